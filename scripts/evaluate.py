"""Measure perplexity at every length: `rope-extend evaluate`, as a script for launchers.

One process:        python scripts/evaluate.py MODEL --data ... --output ...
One per GPU:        torchrun --nproc-per-node 8 scripts/evaluate.py MODEL --data ... --output ...
With accelerate:    accelerate launch --num_processes 8 scripts/evaluate.py MODEL --data ... --output ...
Two CPU processes:  torchrun --nproc-per-node 2 scripts/evaluate.py MODEL --device cpu --data ... --output ...
"""

import sys

from rope_extend.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
