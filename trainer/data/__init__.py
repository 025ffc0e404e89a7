"""From Parquet files to batches: row intervals, hashing, collation, loading."""
