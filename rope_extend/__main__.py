"""`python -m rope_extend` is the `rope-extend` command."""

from rope_extend.cli import main

main()
