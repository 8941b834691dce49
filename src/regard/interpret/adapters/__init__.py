"""Adapters that let ``watch`` record the attention layers of each library."""
