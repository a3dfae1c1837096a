"""Thalweg."""
