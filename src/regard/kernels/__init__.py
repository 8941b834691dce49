"""Kernels: tensors and a plan in, tensors out.

``plan`` describes a call and decides which kernels run each pass. ``passes`` launches them.
``autograd`` adds gradients for eager calls, and ``compiled`` is one operator for compiled graphs.
The kernels are in ``triton`` (every GPU that Triton compiles for), ``hopper`` (compute capability
9.0) and ``cpu``.
``sizes`` has the integers that kernels share with the host, ``compat`` the undocumented parts of
Triton that they use. Triton is imported only when one of its kernels runs.
"""
