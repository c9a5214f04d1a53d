"""The targets of an export. Imports nothing, so the command line can check them at once."""

TARGETS = ("transformers", "vllm", "sglang", "llama.cpp")
