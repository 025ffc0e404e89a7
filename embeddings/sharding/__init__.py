"""Which rank holds which rows, and what travels between ranks.

`sharding` plans: `loads` says what tables need, `placement` chooses, `plans` is the result as data,
`sharders` hands it to TorchRec. `coalesce`, `exchange` and `counters` are about what travels. May
import everything in embeddings/ but `stats`.
"""
