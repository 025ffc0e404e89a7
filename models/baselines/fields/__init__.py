"""Baselines that read field tokens, one short file each."""
