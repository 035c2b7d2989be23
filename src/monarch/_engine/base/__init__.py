"""The vocabulary everyone shares: ids, addresses, errors, settings, instrument points."""
