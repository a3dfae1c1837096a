"""Fine-tuning and RLHF: losses, rollouts, the hybrid engine, and the loops over them."""
