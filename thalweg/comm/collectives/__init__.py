"""Collectives as objects: allocate, call; one form for each way that the bytes can take."""
