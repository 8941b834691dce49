"""Triton kernels, for every GPU that Triton supports."""
