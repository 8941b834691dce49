"""Measure the scores and the speed of models."""
