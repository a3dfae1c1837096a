"""Programs of a DeepSpeed user's first day, and what plain PyTorch computes in their place."""
