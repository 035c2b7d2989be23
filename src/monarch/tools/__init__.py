"""Tools around jobs: what programs describe to have it brought to hosts."""
