"""Fixtures of the end-to-end tests."""

from tests.e2e.launching import launch

__all__ = ["launch"]
