"""The vocabulary of all layers: ids, addresses, errors, settings, instrument points."""
