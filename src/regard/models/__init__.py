"""One module for each architecture, and the code that loads models with their tokenizers."""
