"""What the controller knows of the devices' time: which slot is whose, what was computed when, per iteration.

Always on, and fed with what passes through the controller anyway: `sent` with each message that goes out, `came` with
each that comes in. Pure: no clock, no torch. Under the client's lock.

    CallMsg, TaskMsg ----> slots            who runs what
    SlotCommittedMsg ----> commits          when each layer of each micro-batch was computed
    WeightsReadyMsg -----> units published  how far the optimizer is
    finished step -------> Account          fill, switch, intra, drain of an iteration
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


def _window(
    commits: Sequence[Commit], roles: Sequence[str], iteration: int, begin: float | None = None, end: float = 0.0
) -> Account | None:
    """The account from the first start to the last end of the commits, or of a window of an asynchronous run.

    A window of the latter lies between other iterations, so what is idle at its edges is neither fill nor drain. What
    `simulation.account` says of the same spans; this one runs after every step and so makes no objects.
    """
    by_role: dict[str, list[_Interval]] = {role: [] for role in roles}
    for commit in commits:
        if commit.info.role in by_role:
            by_role[commit.info.role] += _intervals(commit)
    alone = begin is None
    if begin is None:
        begin = min((row[0] for rows in by_role.values() for row in rows), default=0.0)
        end = max((row[1] for rows in by_role.values() for row in rows), default=0.0)
    else:
        first, last = begin, end
        for role, rows in by_role.items():
            by_role[role] = [
                (max(row[0], first), min(row[1], last), row[2], row[3])
                for row in rows
                if row[1] > first and row[0] < last
            ]
    window = end - begin
    if window <= 0:
        return None
    fill = switch = intra = drain = 0.0
    busy: dict[str, float] = {}
    for role, rows in by_role.items():
        rows.sort()
        busy[role] = sum(row[1] - row[0] for row in rows) / window
        if not rows:
            fill += window
            continue
        fill += rows[0][0] - begin
        drain += end - rows[-1][1]
        switched: set[int] = set()
        before = rows[0]
        for after in rows[1:]:
            gap = after[0] - before[1]
            if after[2] in _BACKWARD and after[3] not in switched:
                switched.add(after[3])
                if before[2] == "forward" and before[3] == after[3]:
                    switch += gap
                    gap = 0.0
            intra += gap
            before = after
    if not alone:
        fill, intra, drain = 0.0, fill + intra + drain, 0.0
    total = window * len(by_role)
    peaks: dict[str, int] = {}
    for commit in commits:
        peaks[commit.info.role] = max(peaks.get(commit.info.role, 0), commit.peak_bytes)
    return Account(
        iteration=iteration,
        window_ms=window,
        busy=sum(busy.values()) / len(by_role),
        fill=fill / total,
        switch=switch / total,
        intra=intra / total,
        drain=drain / total,
        busy_by_role=busy,
        peak_by_role=peaks,
    )


_BACKWARD = ("backward", "fused")
_Interval = tuple[float, float, str, int]
"""(start, end, kind of the slot, iteration)."""


def _intervals(commit: Commit) -> list[_Interval]:
    """When a slot was computed; rows that follow each other without a gap are one."""
    kind, iteration = commit.info.task.kind, commit.info.iteration
    found: list[_Interval] = []
    since = until = None
    for row in commit.rows:
        if row[4] != until:
            if since is not None and until is not None:
                found.append((since, until, kind, iteration))
            since = row[4]
        until = row[5]
    if since is not None and until is not None:
        found.append((since, until, kind, iteration))
    return [row for row in found if row[1] > row[0]]
