"""Makes `python -m rope_extend` the `rope-extend` command, also under torchrun and accelerate launch."""

from rope_extend.cli.main import main

main()
