"""Speculative decoding: proposers of draft tokens."""
