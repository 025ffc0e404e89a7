"""Nightly retraining: discover, train, compare, promote or refuse."""
