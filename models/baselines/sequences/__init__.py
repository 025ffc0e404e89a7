"""Baselines that read a stream of fields, history and targets, one short file each."""
