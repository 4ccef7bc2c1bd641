"""Keeping Ctrl-C out of a moment in which two sets of books change together, or a lock is taken.

`with lock:` needs no help, as a lock is C code in which no interrupt is raised. Conditions, events and the start of a
thread take their locks in Python code: an interrupt there would leave one taken for good.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

POLL_S = 0.1
"""How late an interrupt may come to a wait."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that comes within the block is handled right after it. Only the main thread gets any."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def wait_for(event: threading.Event, timeout_s: float | None = None) -> bool:
    """`event.wait(timeout_s)`; an interrupt ends it, and leaves the event as it should be."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not event.is_set():
        left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
        if left <= 0:
            return False
        with uninterrupted():
            event.wait(left)
    return True
