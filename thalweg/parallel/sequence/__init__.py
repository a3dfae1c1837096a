"""Sequence and context parallelism: Ulysses and ring attention."""
