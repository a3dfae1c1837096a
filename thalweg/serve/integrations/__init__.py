"""Thalweg inside other serving systems."""
