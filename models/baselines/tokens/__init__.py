"""Baselines that mix tokens with weights of their own, one short file each."""
