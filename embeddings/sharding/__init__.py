"""Which rank holds which rows, and what travels between ranks."""
