"""FSDP2's private parts."""
