"""Stages, locks, launched processes and their status."""
