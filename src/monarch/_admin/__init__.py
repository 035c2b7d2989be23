"""The admin API: what a job does, by HTTP, for tools, for the dashboard and for the terminal UI.

The observer (`monarch._observer`) serves it, never the script. The facts are those of a diagnosis
(`monarch._diagnosis`), which also shows actors that hang and processes that do not answer; rates,
latencies and logs are queries to the store, where telemetry is on. See docs/observability.md.
"""
