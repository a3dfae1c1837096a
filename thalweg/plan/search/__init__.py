"""Searching configurations with the plan."""
