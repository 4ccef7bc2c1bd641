"""Lines for the person at the terminal, on stderr; a terminal that is gone ends no run."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Print a line on stderr, if there still is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line + "\n")  # as one piece: the launcher writes to the same terminal
        sys.stderr.flush()
