"""Lines for the person at the terminal, on stderr; a terminal that is gone ends no run."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def say(line: str) -> None:
    """Print a line on stderr, if there still is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line + "\n")  # as one piece: the launcher writes to the same terminal
        sys.stderr.flush()


def warn(message: str) -> None:
    """Warn about a line of the user's: the innermost one that is not of this package."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
