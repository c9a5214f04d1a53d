"""One adapter per family shape, each a module with an `ADAPTER`; `rope_extend.families` finds them."""
