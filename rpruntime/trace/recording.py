"""The controller's side of a trace: collects what all processes report, and writes the file when it is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpruntime.interrupts import uninterrupted
from rpruntime.meter import Commit, SlotInfo
from rpruntime.trace.chrome import TraceData, write_trace
from rpruntime.trace.place import check_place
from rpruntime.trace.report import Report, reports
from rpruntime.trace.spans import COMPUTE, MESSAGES, OPTIMIZER, TraceRow, TraceSpan
from rpruntime.trace.waits import waits

log = logging.getLogger(__name__)

MAX_SPANS = 1_000_000
"""About 300 MB of file; what comes later is left out."""
CONTROLLER = "controller"


class Recording:
    """A trace that is being taken. Everything but `wait` and `write` happens under the client's lock.

    Args:
        path: of the file.
        session: name of the session.
        devices: worker's role -> device.
        tell: shows a line to the user.
        steps: (model, first iteration, iteration after the last): ends by itself, and holds only these; None: all
            until it is stopped.

    Raises:
        ConfigError: the file cannot be written there.
    """

    def __init__(
        self,
        path: Path,
        session: str,
        devices: dict[str, str],
        tell: Callable[[str], None],
        steps: tuple[int, int, int] | None = None,
        max_spans: int = MAX_SPANS,
    ) -> None:
        check_place(path)
        self.path = path.absolute()  # the script may change its folder
        self.steps = steps
        self.is_over = False
        self.reports: list[Report] = []
        """What the run's time went to, once it is written."""
        self._data = TraceData(session, devices, {})
        self._tell = tell
        self._max_spans = max_spans
        self._thread: threading.Thread | None = None

    def note_model(self, number: int, name: str, *, asynchronous: bool, num_layers: int) -> None:
        """A model of the session."""
        self._data.models[number] = {"name": name, "asynchronous": asynchronous, "num_layers": num_layers}

    def commit(self, commit: Commit) -> None:
        """A slot has ended."""
        info = commit.info
        if not self._wants(info):
            return
        for phase, start, stop, microbatch, began, ended in commit.rows:
            self._add(_of_slot(info, COMPUTE, phase, began, ended, layers=(start, stop), microbatch=microbatch))

    def rows(self, role: str, rows: Sequence[TraceRow], slots: dict[int, SlotInfo]) -> None:
        """`TraceSpansMsg`; `slots` are those that have not committed."""
        for stream, name, number, first, last, microbatch, began, ended, nbytes in rows:
            if stream in (OPTIMIZER, MESSAGES):
                layers, iteration = (first, last), number if stream == OPTIMIZER else -1
                span = TraceSpan(role, stream, name, began, ended, iteration=iteration, layers=layers, nbytes=nbytes)
                self._add(span)
            elif (info := slots.get(number)) is not None and self._wants(info):
                place = {"layers": (first, last), "microbatch": microbatch, "nbytes": nbytes}
                self._add(_of_slot(info, stream, name, began, ended, role=role, **place))

    def cancelled(self, model: int, calls: range) -> None:
        """What these calls computed belongs to no step; more of it will not be told."""
        self._data.spans = [
            replace(span, iteration=-1) if span.model == model and span.call in calls else span
            for span in self._data.spans
        ]

    def messages(self, count: int, began_ms: float, ended_ms: float) -> None:
        """The controller has taken in so many messages."""
        self._add(TraceSpan(CONTROLLER, MESSAGES, f"{count} messages", began_ms, ended_ms))

    def _wants(self, info: SlotInfo) -> bool:
        if self.steps is None:
            return True
        model, first, last = self.steps
        return info.task.model == model and first <= info.iteration < last

    def _add(self, span: TraceSpan) -> None:
        if self.is_over:
            return
        if len(self._data.spans) < self._max_spans:
            self._data.spans.append(span)
        elif not self._data.note:
            self._data.note = f"full after {self._max_spans} spans: what came later is not in it"
            self._tell(f"the trace is {self._data.note}; pipe.trace(steps=...) takes a part of a run")

    def finish(self, *, in_background: bool) -> None:
        """No more spans; write the file, and say what the time went to."""
        self.is_over = True
        if in_background:
            self._thread = threading.Thread(target=self._write, name="rpruntime-trace", daemon=True)
            with uninterrupted():
                self._thread.start()
        else:
            self._write()

    def is_written(self) -> bool:
        """Whether it is over and nothing is being written any more."""
        return self.is_over and (self._thread is None or not self._thread.is_alive())

    def wait(self) -> None:
        """Until a file that is written in the background is there."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _write(self) -> None:
        data = self._data
        try:
            data.spans += waits(data.spans, data.devices)
            self.reports = reports(data)
            write_trace(self.path, data)
        except Exception as err:  # a trace is no reason to end a run
            if not isinstance(err, OSError):  # a full disk or a folder that has gone needs no traceback
                log.exception("writing the trace")
            self._tell(f"the trace {self.path} could not be written: {type(err).__name__}: {err}")
            return
        self._tell(f"trace    {len(data.spans)} spans in {self.path} (ui.perfetto.dev opens it; rpctl trace draws it)")
        for report in self.reports:
            for line in report.lines():
                self._tell(line)


def _of_slot(
    info: SlotInfo, stream: str, name: str, began: float, ended: float, *, role: str = "", **place: Any
) -> TraceSpan:
    task = info.task
    return TraceSpan(
        role or info.role,
        stream,
        name,
        began,
        ended,
        model=task.model,
        iteration=info.iteration,
        call=task.call,
        slot=task.slot,
        kind=task.kind,
        **place,
    )
