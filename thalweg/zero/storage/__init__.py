"""Where shards and unsharded parameters live."""
