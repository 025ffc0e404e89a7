"""Embedding tables: from sparse ids to vectors. Knows tables and shards, not models.

Layers, each importing only those before it: `schema`, `lookups`, `dynamic` and `pooling`,
`collection`, `optimizer`, `sharding`, `stats`. import-linter checks them.
"""
