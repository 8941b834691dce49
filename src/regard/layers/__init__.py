"""Attention layers, blocks, positions, caches, losses and linear layers for inference."""
