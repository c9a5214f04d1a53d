"""The family shapes, each a module with one `ADAPTER` or `ADAPTERS`."""
