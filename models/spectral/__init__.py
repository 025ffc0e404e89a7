"""Spectra of token matrices, softening, and their gradients."""
