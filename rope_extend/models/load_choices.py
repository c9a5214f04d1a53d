"""The choices of loading options. The module imports nothing, so that `--help` is quick."""

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager")
"""Attention implementations, under the names of transformers."""
QUANTIZED = ("4bit", "8bit")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Strategies of accelerate that spread a model over several devices."""
