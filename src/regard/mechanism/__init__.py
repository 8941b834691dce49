"""What an attention call means, and which backend runs it."""
