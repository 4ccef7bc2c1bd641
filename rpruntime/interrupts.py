"""Signal handlers that raise, as Ctrl-C's does: moments without them, and waits that they may end anywhere.

`with lock:` needs no help, as a lock is C code in which no handler runs. Conditions, events and the start of a thread
take their locks in Python code: an exception there would leave one taken for good.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

LOOK_S = 0.02
"""How often `wait_for` looks."""


class Bell:
    """Wakes who waits for a change. Any thread may ring it, and an exception anywhere in a wait leaves it as it was."""

    def __init__(self) -> None:
        self._listeners: set[threading.Lock] = set()

    def listen(self) -> threading.Lock:
        """A lock that is taken, and released whenever the bell rings; `leave` it at the end."""
        lock = threading.Lock()
        lock.acquire()
        self._listeners.add(lock)
        return lock

    def leave(self, lock: threading.Lock) -> None:
        """Nobody waits for this lock any more."""
        self._listeners.discard(lock)

    def ring(self) -> None:
        """Something has changed."""
        for lock in tuple(self._listeners):
            with contextlib.suppress(RuntimeError):  # it was released before
                lock.release()


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
    """`event.wait(timeout_s)`; an exception may end it anywhere, and leaves the event as it should be."""
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while not event.is_set():
        left = min(LOOK_S, deadline - time.monotonic())
        if left <= 0:
            return False
        time.sleep(left)
    return True
