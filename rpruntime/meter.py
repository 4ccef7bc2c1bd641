"""What the controller knows of the devices' time: which slot is whose, what was computed when, per iteration.

Always on, and fed with what passes through the controller anyway: `sent` with each message that goes out, `came` with
each that comes in. Pure: no clock, no torch. Under the client's lock.

    CallMsg, TaskMsg ----> slots            who runs what
    SlotCommittedMsg ----> commits          when each layer of each micro-batch was computed
    WeightsReadyMsg -----> units published  how far the optimizer is
    finished step -------> Account          fill, switch, intra, drain of an iteration
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpruntime.schedule.engine import Span
from rpruntime.schedule.simulation import Simulation, account
from rpruntime.wire.messages import (
    CallMsg,
    CancelMsg,
    SlotCommittedMsg,
    SlotTask,
    StepMsg,
    TaskMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)

Row = tuple[str, int, int, int, float, float]
"""(phase, first layer, layer after the last, micro-batch, start, end) in milliseconds; see `SlotCommittedMsg.spans`."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot as it was handed out; `iteration` counts the steps of the whole training, -1: inference."""

    task: SlotTask
    role: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A slot that has ended, with what the device computed for it."""

    info: SlotInfo
    rows: tuple[Row, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Account:
    """Where the devices' time went in one iteration; fractions of `window_ms` x devices, as in `Simulation`."""

    iteration: int
    window_ms: float
    busy: float
    fill: float
    switch: float
    intra: float
    drain: float
    busy_by_role: dict[str, float]
    """Of each worker, the fraction of the window that it computed."""
    peak_by_role: dict[str, int]
    """Device memory at its highest, in bytes; 0 on a CPU."""

    @property
    def bubble(self) -> float:
        """The idle fraction."""
        return self.fill + self.switch + self.intra + self.drain


@dataclass
class _Progress:
    """How far the optimizer is with a model's newest step."""

    step: int = -1
    published: set[int] = field(default_factory=set)


class Meter:
    """One for all models of a session.

    Args:
        roles: the workers' roles, in device order.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = tuple(roles)
        self._calls: dict[int, int] = {}
        """Call -> iteration; -1: inference."""
        self.slots: dict[int, SlotInfo] = {}
        """Handed out and not committed."""
        self._commits: dict[tuple[int, int], list[Commit]] = {}
        """(model, iteration) -> its commits."""
        self._asynchronous_ends: dict[int, float] = {}
        """Of each asynchronous model, where the window of the last account ended."""
        self._progress: dict[int, _Progress] = {}
        self.listeners: list[Callable[[Commit], None]] = []
        """Called with every commit (traces)."""
        self._sent: dict[type, Callable[[str, Any], None]] = {
            CallMsg: self._on_call,
            TaskMsg: self._on_task,
            CancelMsg: self._on_cancel,
            StepMsg: self._on_step,
            UnloadModelMsg: self._on_unload,
        }
        self._came: dict[type, Callable[[Any], None]] = {
            SlotCommittedMsg: self._on_committed,
            WeightsReadyMsg: self._on_weights,
        }

    def sent(self, role: str, msg: Any) -> None:
        """A message goes to a role."""
        handler = self._sent.get(type(msg))
        if handler is not None:
            handler(role, msg)

    def came(self, msg: Any) -> None:
        """A message has come; tell this before the machine acts on it."""
        handler = self._came.get(type(msg))
        if handler is not None:
            handler(msg)

    def _on_call(self, role: str, msg: CallMsg) -> None:
        self._calls[msg.call] = msg.iteration if msg.training else -1

    def _on_task(self, role: str, msg: TaskMsg) -> None:
        iteration = self._calls.get(msg.task.call, -1)
        self.slots[msg.task.slot] = SlotInfo(msg.task, role, iteration)

    def _on_cancel(self, role: str, msg: CancelMsg) -> None:
        gone = range(msg.first_call, msg.last_call + 1)
        for slot in [s for s, info in self.slots.items() if info.task.model == msg.model and info.task.call in gone]:
            del self.slots[slot]
        for key, commits in list(self._commits.items()):
            if key[0] == msg.model:
                self._commits[key] = [commit for commit in commits if commit.info.task.call not in gone]

    def _on_step(self, role: str, msg: StepMsg) -> None:
        self._progress[msg.model] = _Progress(msg.step)

    def _on_unload(self, role: str, msg: UnloadModelMsg) -> None:
        for key in [key for key in self._commits if key[0] == msg.model]:
            del self._commits[key]
        for slot in [slot for slot, info in self.slots.items() if info.task.model == msg.model]:
            del self.slots[slot]
        self._progress.pop(msg.model, None)
        self._asynchronous_ends.pop(msg.model, None)

    def _on_weights(self, msg: WeightsReadyMsg) -> None:
        progress = self._progress.get(msg.model)
        if progress is not None and msg.version == progress.step + 1:
            progress.published.update(unit for unit, _ in msg.units)

    def _on_committed(self, msg: SlotCommittedMsg) -> None:
        info = self.slots.pop(msg.slot, None)
        if info is None:
            return  # repeated, or cancelled
        commit = Commit(SlotInfo(info.task, msg.role, info.iteration), msg.spans, msg.peak_bytes)
        if info.iteration >= 0:
            self._commits.setdefault((info.task.model, info.iteration), []).append(commit)
        for listener in self.listeners:
            listener(commit)

    def units_published(self, model: int) -> tuple[int, int]:
        """(step, units of which the version after it is there) of the newest step asked for; (-1, 0): none was."""
        progress = self._progress.get(model, _Progress())
        return progress.step, len(progress.published)

    def step_finished(self, model: int, iteration: int, *, asynchronous: bool) -> Account | None:
        """The account of a step that has just finished; None: nothing is known of it.

        Asynchronous: of the iteration before it, as of this one's time the next one's share is not known yet.
        """
        of_model = sorted(key for key in self._commits if key[0] == model and key[1] <= iteration)
        of_calls = {commit.info.task.call for key in of_model for commit in self._commits[key]}
        self._calls = {call: t for call, t in self._calls.items() if call not in of_calls}
        if not asynchronous:
            commits = self._commits.get((model, iteration), [])
            found = _window(commits, self._roles, iteration)
            for key in of_model:
                del self._commits[key]
            return found
        commits = [commit for key, row in self._commits.items() if key[0] == model for commit in row]
        before = self._commits.get((model, iteration - 1), [])
        begin = self._asynchronous_ends.get(model)
        end = max((row[5] for commit in before for row in commit.rows), default=None)
        if end is not None:
            self._asynchronous_ends[model] = end
        for key in [key for key in of_model if key[1] < iteration - 1]:
            del self._commits[key]
        if begin is None or end is None or end <= begin:
            return None
        return _window(commits, self._roles, iteration - 1, begin, end)


def compute_spans(commits: Iterable[Commit], roles: Sequence[str]) -> list[Span]:
    """Commits as the simulator's spans, by start: one for each row, of the slot's kind."""
    devices = {role: index for index, role in enumerate(roles)}
    spans = [
        Span(
            devices[commit.info.role],
            commit.info.task.kind,
            range(start, stop),
            microbatch,
            max(commit.info.iteration, 0),
            began,
            ended,
        )
        for commit in commits
        for _, start, stop, microbatch, began, ended in commit.rows
        if commit.info.role in devices
    ]
    return sorted(spans, key=lambda span: (span.start_ms, span.end_ms))


def shifted(spans: Iterable[Span], by_ms: float) -> list[Span]:
    """Spans earlier by so much."""
    return [
        Span(s.device, s.kind, s.layers, s.microbatch, s.iteration, s.start_ms - by_ms, s.end_ms - by_ms) for s in spans
    ]


def _window(
    commits: Sequence[Commit], roles: Sequence[str], iteration: int, begin: float | None = None, end: float = 0.0
) -> Account | None:
    """The account from the first start to the last end of the commits, or of a window of an asynchronous run.

    A window of the latter lies between other iterations, so what is idle at its edges is neither fill nor drain.
    """
    spans = compute_spans(commits, roles)
    if not spans:
        return None
    if begin is None:
        found = account(shifted(spans, spans[0].start_ms), len(roles))
    else:
        found = clipped_account(spans, len(roles), begin, end)
    busy = [0.0] * len(roles)
    for span in found.spans:
        busy[span.device] += span.end_ms - span.start_ms
    window = found.makespan_ms or 1.0
    peaks: dict[str, int] = {}
    for commit in commits:
        peaks[commit.info.role] = max(peaks.get(commit.info.role, 0), commit.peak_bytes)
    return Account(
        iteration=iteration,
        window_ms=found.makespan_ms,
        busy=1.0 - found.bubble,
        fill=found.fill,
        switch=found.switch,
        intra=found.intra,
        drain=found.drain,
        busy_by_role={role: value / window for role, value in zip(roles, busy, strict=True)},
        peak_by_role=peaks,
    )


def clipped_account(spans: Iterable[Span], num_devices: int, begin: float, end: float) -> Simulation:
    """What lies in a window of a run whose iterations overlap: idle time at its edges is neither fill nor drain."""
    inside = [
        Span(s.device, s.kind, s.layers, s.microbatch, s.iteration, max(s.start_ms, begin), min(s.end_ms, end))
        for s in spans
        if s.end_ms > begin and s.start_ms < end
    ]
    edge = Span(0, "infer", range(0), -1, 0, end, end)  # no work: the window goes up to here
    found = account([*shifted([*inside, edge], begin)], num_devices, asynchronous=True)
    return Simulation(
        num_devices=num_devices,
        makespan_ms=found.makespan_ms,
        busy_ms=found.busy_ms,
        fill=0.0,
        switch=found.switch,
        intra=found.fill + found.intra + found.drain,
        drain=0.0,
        spans=found.spans[:-1],
    )
