"""Own child processes: fork them from a warm launcher or exec them, bind them, reap them."""
