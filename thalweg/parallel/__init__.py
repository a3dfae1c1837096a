"""Every axis of parallelism beside the data-parallel one."""
