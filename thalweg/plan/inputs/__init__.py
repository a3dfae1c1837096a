"""What the plan runs: the model on the meta device and its input."""
