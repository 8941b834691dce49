"""Packed weights: matrices of small integers, with a scale for each row or part of a row.

``int8`` has integers from -127 to 127 and one scale per row. ``int4`` has integers from -7 to 7,
two in a byte, and one scale per 32 numbers of a row. A checkpoint stores a packed tensor ``name``
as an int8 matrix, or as a uint8 matrix for int4, and its float16 scales as ``name.scale``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from regard.errors import CheckpointError, InputError

Kind = Literal["int8", "int4"]
Packing = Kind | Mapping[str, Kind]  # for all matrices, or a kind for each name pattern

SCALE = ".scale"
GROUP = 32  # numbers of a row that share a scale in int4
_MOST = {"int8": 127, "int4": 7}
_STORED = {torch.int8: "int8", torch.uint8: "int4"}


def pack(matrix: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Pack a matrix [rows, columns] as integers and scales; :func:`unpack` is the inverse.

    A number changes by at most half its scale, or by 0.000008 if the scale is tiny.
    Packing an unpacked matrix gives the same integers and scales.

    >>> numbers, scale = pack(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]), "int8")
    >>> numbers.tolist(), list(scale.shape)
    ([[64, -127, 32], [0, 0, 0]], [2, 1])
    """
    if kind not in _MOST:
        raise InputError(f'A packing must be "int8" or "int4", but got {kind!r}.')
    if matrix.dim() != 2 or not matrix.is_floating_point() or not matrix.numel():
        raise InputError(f"Only matrices are packed, not {matrix.dtype} {list(matrix.shape)}.")
    rows, columns = matrix.shape
    if kind == "int4" and columns % GROUP:
        raise InputError(f"int4 packs rows in parts of {GROUP}, which do not divide {columns}.")
    most = _MOST[kind]
    parts = matrix.detach().float().view(rows, -1, columns if kind == "int8" else GROUP)
    scale = parts.abs().amax(-1) / most  # [rows, parts]
    if not (scale <= torch.finfo(torch.float16).max).all():
        raise InputError("Weights that are not finite, or over 400,000, cannot be packed.")
    scale = _rounded_down(scale)
    steps = scale.float()[..., None]
    # The scale is rounded down, so the largest number may slightly exceed ``most``.
    whole = (parts / steps.where(steps > 0, 1)).round().clamp(-most, most)
    whole = whole.masked_fill(steps == 0, 0).view(rows, columns).to(torch.int8)
    if kind == "int8":
        return whole, scale
    halves = (whole + 8).to(torch.uint8)  # 1 to 15
    return halves[:, ::2] | halves[:, 1::2] << 4, scale


def _rounded_down(scale: Tensor) -> Tensor:
    """Round down to float16, so that packing unpacked weights again gives the same numbers."""
    half = scale.half()
    return torch.where(half.float() > scale, (half.view(torch.int16) - 1).view(torch.float16), half)


def unpack(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 matrix of packed numbers and scales.

    >>> unpack(*pack(torch.tensor([[0.5, -1.0, 0.25]]), "int8")).round(decimals=2).tolist()
    [[0.5, -1.0, 0.25]]
    """
    rows, columns = shape(numbers, scale)
    if not scale.isfinite().all() or scale.lt(0).any():
        raise CheckpointError("Packed weights are damaged: a scale is negative or not finite.")
    if numbers.dtype == torch.uint8:
        whole = torch.stack((numbers & 15, numbers >> 4), -1).view(rows, columns).to(torch.int8) - 8
    else:
        whole = numbers
    if whole.numel() and whole.min() < -_MOST[_STORED[numbers.dtype]]:
        raise CheckpointError("Packed weights are damaged: an integer is below the allowed range.")
    parts = whole.view(rows, scale.shape[1], -1).float() * scale.float()[..., None]
    return parts.view(rows, columns)


def shape(numbers: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return the shape of a packed matrix. CheckpointError if numbers and scales do not fit."""
    kind = _STORED.get(numbers.dtype)
    if kind is None or numbers.dim() != 2 or scale.dtype != torch.float16:
        raise CheckpointError(
            "Packed weights are an int8 or uint8 matrix with float16 scales, not "
            f"{numbers.dtype} {list(numbers.shape)} with {scale.dtype}."
        )
    rows, columns = numbers.shape
    columns *= 2 if kind == "int4" else 1
    parts = columns // GROUP if kind == "int4" else 1
    if scale.shape != (rows, parts) or not columns or (kind == "int4" and columns % GROUP):
        raise CheckpointError(
            f"Weights packed as {kind}, {rows} x {columns}, have scales of shape "
            f"{list(scale.shape)}, not [{rows}, {parts}]."
        )
    return rows, columns


def packed(tensors: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Pack the matrices of a checkpoint, and convert all other tensors to float16.

    Matrices with fewer than 32 rows or columns are not packed. A matrix whose number of columns is
    not a multiple of 32 is packed as int8 instead of int4.
    """
    kinds = packing if isinstance(packing, Mapping) else {"": packing}
    for pattern, kind in kinds.items():
        if kind not in ("int8", "int4"):
            raise InputError(f'A packing must be "int8" or "int4", but got {kind!r}.')
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError(
                f"A packing needs patterns of names, but got {pattern!r}: {error}"
            ) from None
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fitting = [kind for pattern, kind in kinds.items() if re.search(pattern, name)]
        if not fitting or tensor.dim() != 2 or min(tensor.shape) < GROUP:
            found[name] = tensor.half()
            if not found[name].isfinite().all():
                raise InputError(f"{name} holds numbers beyond float16.")
            continue
        parted = not tensor.shape[1] % GROUP
        found[name], found[name + SCALE] = pack(tensor, fitting[0] if parted else "int8")
    return found
