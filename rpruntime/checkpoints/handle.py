"""A save on its way: what the script holds of it, what has come of it, what it prints."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpruntime.errors import CheckpointError
from rpruntime.interrupts import wait_for
from rpruntime.terminal import say
from rpruntime.wire.messages import StateMsg

if TYPE_CHECKING:
    from rpruntime.checkpoints.saves import Saves

SAY_INTERVAL_S = 2.0


class SaveHandle:
    """A save in the background."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._over = threading.Event()
        self._path: Path | None = None
        self._error: CheckpointError | None = None

    def done(self) -> bool:
        """Whether it is complete or has failed."""
        self._saves.work_inline()
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Wait until it is complete; the checkpoint's folder.

        Raises:
            CheckpointError: why it could not be written; training and older checkpoints are as they were.
            TimeoutError: after `timeout` seconds.
        """
        self._saves.work_inline()
        if self._saves.inline and not self._over.is_set():
            raise TimeoutError("the checkpoint waits for work of this inline session")
        if not wait_for(self._over, timeout):
            raise TimeoutError(f"the checkpoint was not complete within {timeout} s")
        if self._error is not None:
            raise self._error
        return str(self._path)

    def __repr__(self) -> str:
        if not self._over.is_set():
            return "SaveHandle(running)"
        return f"SaveHandle({self._error!r})" if self._error is not None else f"SaveHandle({str(self._path)!r})"


@dataclass
class Save:
    """What is to be written, and what of it has come."""

    number: int
    folder: Path
    keep: int | None
    script: bytes = field(repr=False)
    """`script.pt`: what only the script has, as it was at the call."""
    handle: SaveHandle
    units: int
    """How many units will come."""
    step: int = 0
    seed: int = 0
    scaler: dict[str, Any] | None = None
    begun: bool = False
    inbox: deque[StateMsg] = field(default_factory=deque)
    arrived: int = 0
    """Units that have come whole."""
    taken: bool = False
    """Nothing of the session is needed any more."""
    failure: str = ""


class SaveNotice:
    """A line every two seconds of a save that takes long."""

    def __init__(self, save: Save, *, quiet: bool) -> None:
        self._save, self._quiet = save, quiet
        self._began = self._told = time.monotonic()
        self.units = 0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        if not self._quiet and now - self._told > SAY_INTERVAL_S:
            self._told = now
            part = f"{self.units * 100 // max(1, self._save.units):3}%"
            say(
                f"rpruntime: checkpoint step-{self._save.step} {part}, {nbytes / 2**30:.1f} GiB written, "
                f"{now - self._began:.0f} s"
            )
