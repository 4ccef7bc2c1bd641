"""Signals for a select loop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any


class Wakeup:
    """Signals noted as they come, and a descriptor that wakes the loop for them."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self.received: list[tuple[signal.Signals, float]] = []
        self._before: dict[int, Any] = {}
        self._fd_before = -1

    def install(self, numbers: tuple[signal.Signals, ...]) -> None:
        """Note these signals from now on; one that was ignored when we started (nohup) stays so."""
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.received.append((signal.Signals(number), time.monotonic()))

    def drain(self) -> None:
        """Empty the wake pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass

    def take(self) -> list[tuple[signal.Signals, float]]:
        """The signals since the last call, with their times."""
        taken = self.received[:]
        del self.received[: len(taken)]
        return taken

    def close(self) -> None:
        """Put everything back."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.read_fd)
        os.close(self._write_fd)
