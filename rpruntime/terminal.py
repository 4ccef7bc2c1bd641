"""Lines for the person at the terminal, on stderr; a terminal that is gone ends no run."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator

from rpruntime.interrupts import uninterrupted

_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:torch|transformers|peft)/|/lib/python[\d.]+/(?:copy|pickle|contextlib)\.py$"
)
_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def say(line: str) -> None:
    """Print a line on stderr, if there still is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line + "\n")  # as one piece: the launcher writes to the same terminal
        sys.stderr.flush()


SAY_INTERVAL_S = 1.9
"""Between two lines about something that takes long."""


@contextlib.contextmanager
def saying(what: str, *, quiet: bool) -> Iterator[None]:
    """Say every two seconds that what happens in the block is still going on."""
    over = threading.Event()
    began = time.monotonic()

    def run() -> None:
        while not over.wait(SAY_INTERVAL_S):
            say(f"rpruntime: {what} ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=run, name="rpruntime-saying", daemon=True)
    started = False
    try:
        if not quiet:
            with contextlib.suppress(RuntimeError), uninterrupted():  # at Python's end no thread can be started
                thread.start()
                started = True
        yield
    finally:
        with uninterrupted():
            over.set()
        if started:
            thread.join()


def warn(message: str) -> None:
    """Warn about a line of the user's: the innermost one that is not of this package, nor of what calls it back."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_not_the_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_not_the_users(file: str) -> bool:
    return file.startswith(_HERE) or _LIBRARY.search(file) is not None
