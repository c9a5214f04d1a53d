"""The family shapes: each module has records of families, `FAMILIES`."""
