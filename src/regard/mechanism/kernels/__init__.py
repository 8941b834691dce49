"""Kernels for the GPU, in Triton: raw tensors in and out.

``structure`` says what a kernel must know of a call and needs no Triton; ``launch`` has a function
for each pass, and importing it imports Triton.
"""
