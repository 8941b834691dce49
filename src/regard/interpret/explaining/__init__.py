"""One attention step by step, with its numbers."""
