"""What is planned: the run, the cluster."""
