"""A single-device model on many devices: parallelism, precision, optimizers, the pipelined step."""
