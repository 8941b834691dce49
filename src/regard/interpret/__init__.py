"""Inspect attention: watch, look, explain."""
