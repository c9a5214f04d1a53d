"""LoRA fine-tuning for longer windows: the recipe, the loop, and its memory plan."""
