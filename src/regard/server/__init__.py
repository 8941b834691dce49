"""The tasks over HTTP, and the page."""
