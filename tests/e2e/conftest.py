"""Fixtures of the end-to-end tests."""

from tests.e2e.launch_support import launch

__all__ = ["launch"]
