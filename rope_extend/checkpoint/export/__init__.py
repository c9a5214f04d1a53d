"""Export of a checkpoint to other inference engines."""
