"""The HTTP server: the tasks as JSON requests, and a web page."""
