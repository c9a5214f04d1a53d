"""The `rope-extend` command: each module holds a group of commands, which call the library."""
