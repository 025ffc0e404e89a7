"""Diagnostics of representations: effective ranks and clusters."""
