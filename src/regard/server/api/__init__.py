"""The requests of the HTTP server."""
