"""Losses that never hold full logits."""
