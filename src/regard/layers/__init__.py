"""Attention layer, blocks, positions, caches, losses, linear layers for inference."""
