"""Move bytes over one link and report its loss. Shared memory for big payloads."""
