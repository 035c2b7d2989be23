"""The store of a job's telemetry: recorded rows in memory, bounded, for SQL that only reads.

`store` takes batches and answers queries, by duckdb (`duck`) or, without that package, by sqlite3
(`lite`). `tables` has the narrow tables of what is recorded, and the documented tables as views of
them. `statement` decides what a query may be. `http` serves it.
"""
