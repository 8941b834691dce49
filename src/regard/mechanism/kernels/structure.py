"""What a kernel needs to know of a call beside its tensors: its mask, its bias and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The same numbers as in tiles.py, which cannot be imported without Triton.
FULL, CAUSAL, INTERVAL = 0, 1, 2
PLAIN, ALIBI, TABLE = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """A mask as a range of keys for each query, a bias as one row of numbers for each head.

    ``kind`` is FULL, CAUSAL, or INTERVAL with its ends ``low`` and ``high``, int32 as
    [1 or batch, queries]. ``bias`` is PLAIN, ALIBI with slopes as [heads, 1], or TABLE with a
    number for each distance from -reach to reach as [heads, 2 * reach + 1], the ends standing for
    all beyond. Both are float32 and held in ``table``.
    """

    kind: int
    low: Tensor | None
    high: Tensor | None
    bias: int
    table: Tensor | None
    reach: int
    scale: float
    softcap: float | None

    def bounds(self, first: Tensor, last: Tensor) -> Tensor:
        """For each block of keys ``first`` to ``last``, the queries that matter to it.

        As [1 or batch, blocks, 4]: where those begin that see some of these keys, where those begin
        that see beyond the last, where those end that see the first, where all end.
        """
        assert self.low is not None
        assert self.high is not None
        both = torch.cat((first, last)).to(torch.int32)
        ends = []
        for side in (self.high, self.low):
            spread = both.expand(side.shape[0], -1).contiguous()
            ends.append(torch.searchsorted(side, spread, right=True, out_int32=True))
        batch = max(end.shape[0] for end in ends)
        high, low = (end.reshape(len(end), 2, -1).expand(batch, -1, -1) for end in ends)
        return torch.stack((high[:, 0], high[:, 1], low[:, 0], low[:, 1]), dim=-1).contiguous()
