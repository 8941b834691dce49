"""Kernels: tensors and a plan in, tensors out.

``plan`` describes a call and decides which kernels run each pass; ``passes`` follows the plan, with
gradients in ``autograd`` and as one operator for compiled graphs in ``compiled``. The kernels are
in ``triton`` (every GPU that Triton compiles for), ``hopper`` (compute capability 9.0) and ``cpu``.
``sizes`` has the integers that they share with the host, ``compat`` what Triton does not document.
Nothing here imports Triton before a kernel of it runs.
"""
