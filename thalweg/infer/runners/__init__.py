"""What computes a step: the CPU kernels, torch's operators, or the model's own code."""
