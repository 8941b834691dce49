"""Plain integers that the host, the kernels and the emulator of the tests share.

The host plans with them; the kernels wrap them in constexpr. This module does not import Triton.
"""

from __future__ import annotations

# Kinds of mask. A query attends to all keys, the keys up to its position, or a range of keys.
FULL, CAUSAL, INTERVAL = 0, 1, 2
# Kinds of bias: none, a slope per head, a number per head and distance, Transformer-XL's term.
PLAIN, ALIBI, TABLE, RELATIVE = 0, 1, 2, 3

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# How a tensor core spreads a product [rows, columns] over the threads of a warp.
LANES = 4  # threads that share a row
PAIR = 2  # neighbouring columns that one thread holds
BAND = 16  # rows that one warp holds

# The kernels for Hopper.
ROWS = 64  # rows of a product that a warpgroup (four warps) holds
BLOCK = 128  # rows of a tile of queries or keys
TEAMS = 4  # warpgroups that share the tiles of one program in the passes `columns` and `top`
STRIP = 64  # columns of a tile that one copy loads in those passes
SETS = 8  # sets into which a lane's scores are divided; the forward pass keeps the maxima
MAX_TOP_KEYS = 8  # the most top keys that the pass `top` can find
MAX_SHARES = 7  # the most shares into which the steps of a block are split
JOINED = MAX_SHARES + 1  # the most programs that work on one block: a share may begin inside it
SPLIT_BLOCKS = 2  # the most split blocks that one program works on
UNSET_COUNTER = -8388608  # initial value of work counters: the bits of float32 -inf
