"""Bounded tables whose rows follow unbounded ids.

`slots` (which id has which row) < `idmap` (admission and eviction) < `dynamic` (vectors) <
`dynamic_sharding` (ranks); `buckets` is the arithmetic under all of them. May import `schema` and
`lookups`.
"""
