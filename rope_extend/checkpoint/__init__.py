"""Checkpoints that carry their encoding: saving, loading, merging, verifying and cards."""
