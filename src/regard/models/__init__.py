"""The model architectures, and loading models with their tokenizers."""
