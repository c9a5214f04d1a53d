"""Names of the ways to pack blocks and to number their tokens, as recipes use them; imports nothing heavy."""

UNPACKED = "none"
"""The value of `packing` for blocks of one document each."""
RESTART = "restart"
"""The value of `packing` for several documents in a block, with positions that begin at 0 in each."""

CONSECUTIVE = "consecutive"
"""The value of `positions` that samples none: 0, 1, 2, …"""
SAMPLED = ("pose", "cream", "random")
"""The values of `positions` that spread a short block over a long window."""
SHORTEST = 3
"""Minimum number of tokens of such a block: a head, a tail, and a piece between them."""
