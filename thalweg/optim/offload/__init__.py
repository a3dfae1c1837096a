"""Updates of state that lies on the host or on NVMe."""
