"""Plain integers that the host, the kernels and the emulator of the tests share.

The host plans with them, the kernels wrap them in constexpr. Triton is not needed to import this.
"""

from __future__ import annotations

# Kinds of mask: every key; the keys up to the query; one range of keys for each query.
FULL, CAUSAL, INTERVAL = 0, 1, 2
# Kinds of bias: none; a slope for each head; a number for each distance; Transformer-XL's term.
PLAIN, ALIBI, TABLE, RELATIVE = 0, 1, 2, 3

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# How a tensor core lays out a product [rows, columns] in the threads of a warp.
LANES = 4  # threads that share a row
PAIR = 2  # neighbouring columns that one thread holds
BAND = 16  # rows that one warp holds

# The kernels for Hopper.
ROWS = 64  # rows of a product that a warpgroup (four warps) holds
BLOCK = 128  # rows of a tile of queries or keys
TEAMS = 4  # warpgroups that share the tiles of one program in the passes `columns` and `top`
STRIP = 64  # columns of a tile that one copy loads in those passes
SETS = 8  # sets of a lane's scores; the forward pass keeps the highest score of each
MAX_TOP_KEYS = 8  # top keys that the pass `top` can find
MAX_SHARES = 7  # shares that the steps of one block are split into, at most
JOINED = MAX_SHARES + 1  # programs that can have a share of one block: one may begin inside of it
SPLIT_BLOCKS = 2  # blocks that a program may have a part of, at most
UNSET_COUNTER = -8388608  # where work counters begin: the bits of float32 -inf
