"""The demonstration: extends the bundled model 8x."""
