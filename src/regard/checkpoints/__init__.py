"""Model files: found, downloaded, read, written, packed; their cards."""
