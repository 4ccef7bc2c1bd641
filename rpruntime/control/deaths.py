"""What follows a worker's death (docs/faults.md): fences, blame, its slots done again, and its replacement.

RoleDied --> FenceMsg to everybody; what it had not committed --> other workers
RoleReady, and everybody has answered --> the replacement is told everything and takes part
"""

from __future__ import annotations

import pickle
from dataclasses import replace

from rpruntime.control.calls import Calls
from rpruntime.control.cancels import Cancels
from rpruntime.control.commits import Commits
from rpruntime.control.events import EndRun, NoteRedone, ReleaseOwner, Send
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER, Roster
from rpruntime.control.slots import Slot, Slots
from rpruntime.errors import WorkerDied
from rpruntime.wire.messages import (
    AdoptMsg,
    ErrorInfo,
    FencedMsg,
    FenceMsg,
    Key,
    RoleDiedMsg,
    RoleReadyMsg,
    SlotCommittedMsg,
    SlotFailedMsg,
)

MAX_TASK_FAILURES = 2
"""The slot is blamed when so many processes have died with it running."""


class Deaths:
    """Keeps the roster up to date, and hands slots out again where it changes.

    Args:
        max_task_failures: processes that may die with one slot running before its call fails.
    """

    def __init__(
        self,
        max_task_failures: int,
        roster: Roster,
        models: Models,
        calls: Calls,
        slots: Slots,
        cancels: Cancels,
        commits: Commits,
        lifetimes: Lifetimes,
        out: Outbox,
    ) -> None:
        self._max_task_failures = max_task_failures
        self._roster = roster
        self._models = models
        self._calls = calls
        self._slots = slots
        self._cancels = cancels
        self._commits = commits
        self._lifetimes = lifetimes
        self._out = out

    # --- a death

    def on_died(self, msg: RoleDiedMsg) -> None:
        """A worker's process has ended."""
        had_work = not self._roster.is_away(msg.role)
        if not self._roster.bury(msg.role, msg.incarnation, msg.restarts, self._calls):
            return
        for by in (*self._roster.to_fence(), OPTIMIZER):
            self._fence(by, msg.role)
        self._cancels.forget_worker(msg.role)
        self._blame(msg)
        if not self._roster.expected:
            self._out.add(EndRun(f"no worker is left: {msg.who} died: {msg.reason}"))
            return
        self._announce_again(msg.role)
        self._redo(msg.role, note=had_work or self._roster.is_retired(msg.role))

    def _fence(self, by: str, role: str) -> None:
        self._roster.fence(by, role)
        msg = FenceMsg(role, self._roster.incarnation(role), self._roster.is_retired(role))
        self._out.add(Send(by, msg))  # to replacements that have not joined yet too

    def _blame(self, msg: RoleDiedMsg) -> None:
        """Count the death against the slots that were running; one too many fails the call."""
        for number in msg.slots:
            if not self._slots.is_running(number) or self._cancels.covers(self._slots[number].task):
                continue
            slot = self._slots[number]
            slot.causes.append(f"{msg.who}: {msg.reason}")
            if len(slot.causes) >= self._max_task_failures:
                here = msg if number == msg.slots[-1] else replace(msg, phase="", layer=-1, microbatch=-1)
                self._cancels.on_failed(SlotFailedMsg(number, slot.task.call, msg.role, _error(slot, here)))

    def _announce_again(self, role: str) -> None:
        """What a dead worker published may not have reached everybody."""
        for key in self._lifetimes.live_keys():
            announced = self._lifetimes.announced(key)
            if announced is None or announced[1] != role:
                continue
            if key[0] == "buffer":
                self._out.send_all(announced[0])
            else:
                for reader in sorted({slot.role for slot in self._slots.reading(key)}):
                    self._out.send(reader, announced[0])
        for number in self._calls:
            for by, msg in self._calls[number].slabs.values():
                if by == role:
                    self._out.send(OPTIMIZER, msg)

    def _redo(self, role: str, *, note: bool = True) -> None:
        """Hand out again what a dead worker has not committed, lowest number first."""
        slots = self._uncommitted(role)
        complete, count, targets = [], 0, self._roster.expected
        for index, number in enumerate(slots):
            slot = self._slots[number]
            left = tuple(m for m in slot.task.microbatches if not self._is_finished(slot, m))
            if slot.task.microbatches and not left:
                complete.append(number)
                continue
            count += len(left)
            self._slots.move(number, targets[index % len(targets)], left)
        if note and len(slots) > len(complete):
            self._out.add(NoteRedone(role, len(slots) - len(complete), count, targets))
        for number in complete:
            self._commits.on_committed(SlotCommittedMsg(number, role))

    def _uncommitted(self, role: str) -> list[int]:
        """What a role has to run, ascending."""
        return [n for n in self._slots.running_on(role) if not self._cancels.covers(self._slots[n].task)]

    def _is_finished(self, slot: Slot, m: int) -> bool:
        """Whether everything that a micro-batch publishes is there; sums of gradients died with the process."""
        task, call, model = slot.task, self._calls[slot.task.call], self._models[slot.task.model]
        if task.kind in ("fused", "backward"):
            return False
        expected: list[Key] = [("act", task.call, m, position) for position, _ in task.publish]
        if task.kind == "forward":
            expected += [("buffer", task.call, m, p) for p in range(*task.layers) if p in model.buffered()]
        elif task.layers[1] == len(model.spec.layer_units):
            if not call.event.wants_output:
                return m in call.losses
            expected.append(("out", task.call, m))
        return all(key in slot.written for key in expected)

    # --- a replacement

    def on_ready(self, msg: RoleReadyMsg) -> None:
        """It takes messages; others may not have heard of the death."""
        if not self._roster.ready(msg.role, msg.incarnation):
            return
        for other in self._roster.replaced():
            if other != msg.role:
                self._fence(msg.role, other)
        self._join()

    def on_fenced(self, msg: FencedMsg) -> None:
        """Somebody takes nothing from the dead process any more."""
        self._roster.fenced(msg.by, msg.role, msg.incarnation)
        self._join()

    def _join(self) -> None:
        """Tell replacements all that the others know; from now on they take part."""
        for role in self._roster.joining():
            self._roster.join(role)
            self._models.tell(role)
            for number in self._uncommitted(role):
                self._slots.hand_over(number)
        for role in self._roster.workers:  # what waited for a replacement that others have overtaken
            if self._roster.living and self._roster.is_away(role):
                self._redo(role)

    def settle_graves(self) -> None:
        """Arenas of dead processes that nobody reads any more go to their replacements, or as a whole."""
        if not self._roster.graves:
            return
        owners = {extent.owner for extent in self._lifetimes.live_extents()}
        of_buffers = {key[1] for key in self._lifetimes.live_keys() if key[0] == "buffer"}  # read by later calls too
        for grave in self._roster.silent_graves(of_buffers.union(self._calls), owners):
            for owner in grave.owners:
                if self._roster.is_retired(grave.role):
                    self._out.add(ReleaseOwner(owner))
                else:
                    self._out.send(grave.role, AdoptMsg(owner))


def _error(slot: Slot, msg: RoleDiedMsg) -> ErrorInfo:
    """What the script is told of a slot that has ended too many processes."""
    causes = slot.causes
    first, last = slot.task.layers[0], slot.task.layers[1] - 1
    where = f"layer {first}" if first == last else f"layers {first} to {last}"
    count = "a process" if len(causes) == 1 else f"{len(causes)} processes"
    text = f"{where} ({slot.task.kind}) ended {count} and will not be tried again; first {causes[0]}"
    text += "".join(f"; then {cause}" for cause in causes[1:])
    return ErrorInfo(
        pickled=pickle.dumps(WorkerDied(text)),
        type_name="WorkerDied",
        text=text,
        traceback="",
        frames=(),
        phase=msg.phase,
        layer=msg.layer,
        microbatch=msg.microbatch,
        device=msg.role,
    )
