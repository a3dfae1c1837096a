"""Replicas of the engine and the pool that spreads requests over them."""
