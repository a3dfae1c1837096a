"""The plan as text and as a page."""
