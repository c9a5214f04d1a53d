"""Every attention function that rope_extend registers with transformers."""
