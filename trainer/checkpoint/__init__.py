"""Checkpoints that are complete or absent: written, listed, kept, read."""
