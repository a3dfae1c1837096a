"""Tensor parallelism: plans, sharded layers, and a parity check."""
