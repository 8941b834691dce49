"""Kernels for the GPU, in Triton: raw tensors in and out.

``structure`` says what a kernel must know of a call; ``operators`` is attention with its gradient,
and ``graphs`` the same inside a compiled graph. None of them needs Triton. ``launch`` has a
function for each pass, and importing it imports Triton. ``tiles`` is what the kernels share:
``forward``, ``columns``, ``rows``, ``deltas`` and ``backward``.
"""
