"""See and follow what attention does: watch, look, explain."""
