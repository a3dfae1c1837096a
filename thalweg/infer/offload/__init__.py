"""Weights larger than memory: rings of buffers that a file or a module's parameters pass through."""
