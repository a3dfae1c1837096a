"""Linear layers: the kernels a processor offers, and the measurement that picks one."""
