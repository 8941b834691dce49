"""Explain one attention call step by step, with its numbers."""
