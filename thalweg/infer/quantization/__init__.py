"""Weights in 8 and 4 bits: packing, quantised modules, checkpoints that come quantised."""
