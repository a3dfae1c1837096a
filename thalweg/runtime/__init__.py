"""Paths below ``deepspeed.runtime`` that programs name; the work is done in the rooms that they lead to."""
