"""What a trace holds, and the log in which a worker or the optimizer notes it while it traces.

All times are milliseconds of CLOCK_MONOTONIC, which all processes of a machine share; a device's are measured by the
device and put on that clock (`Transfers.when_ms`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rpruntime.wire.messages import TraceSpansMsg

COMPUTE = "compute"
COPIES = ("weights up", "activations up", "activations down", "gradients down")
"""The four kinds of transfer, by stream."""
WAITS = "waits"
OPTIMIZER = "optimizer"
MESSAGES = "messages"
STREAMS = (COMPUTE, WAITS, *COPIES, OPTIMIZER, MESSAGES)
"""In the order in which they are shown."""

ROWS_A_MESSAGE = 4000
"""About a third of the largest message."""

TraceRow = tuple[str, str, int, int, int, int, float, float, int]
"""As in `TraceSpansMsg`."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that took from `start_ms` to `end_ms` on a stream of a role; -1 where a number says nothing.

    `iteration` counts the steps of the whole training. `kind` is the slot's: "forward", "fused", "backward", "infer".
    """

    role: str
    stream: str
    name: str
    start_ms: float
    end_ms: float
    model: int = -1
    iteration: int = -1
    call: int = -1
    slot: int = -1
    kind: str = ""
    layers: tuple[int, int] = (-1, -1)
    microbatch: int = -1
    nbytes: int = 0


class SpanLog:
    """Rows of one process that are on their way to the controller; while it is off, callers note nothing."""

    def __init__(self) -> None:
        self.on = False
        self._rows: list[TraceRow] = []

    def switch(self, on: bool) -> None:
        """`TraceMsg`."""
        self.on = on
        self._rows.clear()

    def add(
        self,
        stream: str,
        name: str,
        start_ms: float,
        end_ms: float,
        *,
        number: int = -1,
        layers: tuple[int, int] = (-1, -1),
        microbatch: int = -1,
        nbytes: int = 0,
    ) -> None:
        """Note a span; ask `on` before measuring one."""
        self._rows.append((stream, name, number, *layers, microbatch, start_ms, end_ms, nbytes))

    def take(self, role: str) -> list[TraceSpansMsg]:
        """Messages with all rows so far."""
        if not self._rows:
            return []
        rows, self._rows = self._rows, []
        starts = range(0, len(rows), ROWS_A_MESSAGE)
        return [TraceSpansMsg(role, tuple(rows[start : start + ROWS_A_MESSAGE])) for start in starts]
