"""How far something long has come: a bar on a terminal, else a line every two seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

from rpruntime.store.limits import gib
from rpruntime.terminal import SAY_INTERVAL_S, say

SHORT_S = 0.5
"""What is over by then needs no bar."""


class Bar:
    """Shows what is done of a number of bytes; as a context manager it takes the bar away at the end.

    Args:
        what: "reading weights".
        quiet: show nothing.
    """

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what = what
        self._quiet = quiet
        self._began = self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self.done = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """How long it takes already."""
        return time.monotonic() - self._began

    def update(self, done: int, total: int) -> None:
        """So many bytes of so many are done."""
        self.done = done
        if self._quiet:
            return
        if sys.stderr.isatty():
            if self._bar is None and self.seconds < SHORT_S:
                return
            if self._bar is None:
                self._bar = _make_bar(self._what)
                self._bar.start()
                self._task = self._bar.add_task(self._what, total=total)
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._told > SAY_INTERVAL_S:
            self._told = time.monotonic()
            say(f"         {self._what}, {gib(done)} of {gib(total)} ... {self.seconds:.0f} s")


def _make_bar(what: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"         {what}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
