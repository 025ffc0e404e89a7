"""Several epochs under inheritance policies."""
