"""What a worker's copies come to: bytes on its status page, and spans while it is traced.

Each copy is counted as it starts. While the log is on it also gets two marks around it on its own stream; once the
device has reached the second, the copy is a span.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from rpruntime.status import StatusWriter
from rpruntime.trace.spans import COPIES, SpanLog

if TYPE_CHECKING:
    from rpruntime.worker.transfers import Transfers

WEIGHTS_UP, ACTIVATIONS_UP, ACTIVATIONS_DOWN, GRADIENTS_DOWN = range(4)
"""Places in `COPIES`."""

Place = tuple[int, int, int, int]
"""(slot, first layer, layer after the last, micro-batch) that a copy belongs to; -1 where it says nothing."""


class CopyLog:
    """Of one device."""

    def __init__(self, status: StatusWriter) -> None:
        self.spans = SpanLog()
        self.place: Place = (-1, -1, -1, -1)
        """Of what is copied from now on."""
        self._status = status
        self._open: deque[tuple[int, Place, Any, Any, int]] = deque()

    @property
    def on(self) -> bool:
        """Whether copies are to be marked."""
        return self.spans.on

    def switch(self, on: bool) -> None:
        """Begin or end a trace."""
        self.spans.switch(on)
        self._open.clear()

    def count(self, kind: int, nbytes: int) -> None:
        """A copy starts."""
        self._status.copied(kind, nbytes)

    def note(self, kind: int, place: Place, begin: Any, end: Any, nbytes: int) -> None:
        """A copy lies between these marks."""
        self._open.append((kind, place, begin, end, nbytes))

    def settle(self, transfers: Transfers) -> None:
        """Make spans of the copies that are done."""
        waiting: deque[tuple[int, Place, Any, Any, int]] = deque()
        for kind, place, begin, end, nbytes in self._open:
            if not transfers.reached(end):
                waiting.append((kind, place, begin, end, nbytes))
                continue
            slot, first, last, microbatch = place
            times = transfers.when_ms(begin), transfers.when_ms(end)
            self.spans.add(
                COPIES[kind], COPIES[kind], *times, number=slot, layers=(first, last), microbatch=microbatch,
                nbytes=nbytes,
            )  # fmt: skip
        self._open = waiting
