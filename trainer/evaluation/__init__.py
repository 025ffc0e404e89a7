"""Evaluation of a model on test rows, by slices and with diagnostics."""
