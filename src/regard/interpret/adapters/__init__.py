"""How the attention layers of each library are watched."""
