"""Tools around jobs: descriptions of what is to be copied to hosts."""
