"""Model parts: the reference GPT and the layers that PyTorch lacks."""
