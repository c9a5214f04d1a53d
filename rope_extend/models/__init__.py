"""What rope_extend knows of a model: its family, rotary modules, config, loading and devices."""
