"""Metrics of predictions: streaming, over all ranks, in bounded memory."""
