"""Measure perplexity at every length: `rope-extend evaluate`, as a script.

python scripts/evaluate.py --help
"""

import sys

from rope_extend.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
