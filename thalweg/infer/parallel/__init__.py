"""One model on several processes: tensor, pipeline and expert parallelism of inference."""
