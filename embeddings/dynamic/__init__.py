"""Bounded tables whose rows follow unbounded ids."""
