"""Embedding tables: from sparse ids to vectors. Knows tables and shards, not models."""
