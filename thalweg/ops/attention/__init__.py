"""Attention kernels beside their plain forms."""
