"""The architectures, one a file, and loaded models with their tokenizers."""
