"""Names of the ways to pack blocks and to number their tokens, as recipes use them; imports nothing heavy."""

UNPACKED = "none"
"""The value of `packing` for blocks of one document each."""
RESTART = "restart"
"""The value of `packing` for positions that begin at 0 in each document of a block."""
CONTINUE = "continue"
"""The value of `packing` for positions that run through the whole block.

Attention is within a document in both cases.
"""
PACKINGS = (UNPACKED, RESTART, CONTINUE)

CONSECUTIVE = "consecutive"
"""The value of `positions` that samples none: 0, 1, 2, …"""
SAMPLED = ("pose", "cream", "random")
"""The values of `positions` that spread a short block over a long window."""
