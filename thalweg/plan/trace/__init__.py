"""One training step traced on fake tensors."""
