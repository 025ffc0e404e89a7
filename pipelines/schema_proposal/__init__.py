"""A schema proposed from a sample of a log."""
