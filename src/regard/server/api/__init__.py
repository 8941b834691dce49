"""What can be requested over HTTP."""
