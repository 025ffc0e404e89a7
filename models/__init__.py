"""Towers and everything between a batch and its loss: readable single-device code."""
