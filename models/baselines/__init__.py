"""Baseline towers: of fields, of sequences, of tokens."""
