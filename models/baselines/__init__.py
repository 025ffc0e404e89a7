"""Baseline towers, one short file each."""
