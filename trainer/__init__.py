"""Training on many devices: data, distribution, precision, loop, metrics, checkpoints."""
