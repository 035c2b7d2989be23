"""Turn messages into frames and payloads into bytes, and back. No sockets, no clocks, no tasks."""
