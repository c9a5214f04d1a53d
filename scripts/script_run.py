"""How a script that measures for hours starts: what it logs, and how it ends on a user's mistake."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from rope_extend.errors import RopeExtendError


def run(main: Callable[[], None], *logged: str, style: str = "%(asctime)s %(message)s") -> None:
    """Run a script; an error of ours is one line, and exit code 1. After Ctrl-C it is 130.

    Args:
        main: what it does.
        logged: loggers whose progress is shown (the empty name: all); of others, warnings are.
        style: form of a line of the log.
    """
    logging.basicConfig(level=logging.WARNING, format=style)
    for name in logged:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        main()
    except RopeExtendError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted; what is finished is kept, and the same command continues", file=sys.stderr)
        sys.exit(130)
