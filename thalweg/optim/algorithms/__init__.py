"""The optimisers: one file for each family of update rules."""
