"""MII's calls."""
