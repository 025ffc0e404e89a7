"""Raw logs to checked, typed, date-partitioned Parquet."""
