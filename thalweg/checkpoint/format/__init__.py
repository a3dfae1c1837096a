"""The format on disk: manifest, shards, and what the tensors of a checkpoint look like."""
