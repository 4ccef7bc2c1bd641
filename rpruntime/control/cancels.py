"""What follows a failure, or an iteration that is given up: everybody is asked to cancel, then its data is freed.

    CancelMsg to everybody --> CancelledMsg from everybody --> data freed, counters set back --> FinishCancel

Extents of cancelled slots are freed only when everybody has answered: until then a peer may read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rpruntime.control.calls import Calls
from rpruntime.control.checkpoints import Checkpoints
from rpruntime.control.events import AbandonEvent, EndRun, FinishCancel, ReportFailure
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.model import Model
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER, Roster
from rpruntime.control.slots import Slots
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import CancelledMsg, CancelMsg, RoleFailedMsg, SlotFailedMsg, SlotTask

Leftover = tuple[str, int, int]
"""("left", model, first cancelled call), a reader of `Lifetimes`."""


@dataclass
class Cancel:
    """One that somebody has not answered yet."""

    first_call: int
    last_call: int
    iteration: int | None
    """Where to rewind to; None: an inference call failed, which changes nothing."""
    abandoned: bool
    """Nobody wants to go on from there, so a step that was taken meanwhile does no harm."""
    waits_for: set[str]
    extents: tuple[Extent, ...] = ()
    """Written for cancelled slots."""
    failed: list[SlotFailedMsg] = field(default_factory=list)
    """Failures reported meanwhile."""

    def __contains__(self, call: int) -> bool:
        return self.first_call <= call <= self.last_call


class Cancels:
    """At most one a model."""

    def __init__(
        self,
        roster: Roster,
        models: Models,
        calls: Calls,
        slots: Slots,
        checkpoints: Checkpoints,
        lifetimes: Lifetimes,
        out: Outbox,
    ) -> None:
        self._roster = roster
        self._models = models
        self._calls = calls
        self._slots = slots
        self._checkpoints = checkpoints
        self._lifetimes = lifetimes
        self._out = out
        self._open: dict[int, Cancel] = {}
        """By model."""
        self._given_up: set[int] = set()
        """Models of which nothing is to run any more."""
        self._strays: set[tuple[int, int, str]] = set()
        """(model, call, role) of cancels that were sent for a failed slot of a call that is not known."""
        self._leftovers: dict[int, dict[Leftover, tuple[Extent, ...]]] = {}
        """By model, what cancelled slots have committed, under the reader that waits for the keys that they read: some
        of it may be what lies under those keys, passed on unchanged."""

    # --- what others may ask

    def is_open(self, model: int) -> bool:
        """Whether a cancel of a model waits for answers."""
        return model in self._open

    def covers(self, task: SlotTask) -> bool:
        """Whether a slot is being cancelled, or will be when another cancel is over."""
        cancel = self._open.get(task.model)
        return cancel is not None and (task.call in cancel or any(failed.slot == task.slot for failed in cancel.failed))

    def cancels_call(self, model: int, call: int) -> bool:
        """Whether a call is being cancelled."""
        return model in self._open and call in self._open[model]

    def takes_along(self, model: int, step: int) -> bool:
        """Whether a step goes with an iteration that is being given up."""
        cancel = self._open.get(model)
        return cancel is not None and cancel.abandoned and cancel.iteration is not None and step >= cancel.iteration

    def open_calls(self, number: int) -> tuple[int, ...]:
        """Calls that go with the model's open iteration when it is given up: evaluations issued since it began too."""
        iteration = self._models[number].iteration
        return self._calls_that_go(number, *self._calls_from(number, iteration), iteration)

    def is_settled(self) -> bool:
        """Whether nothing waits for anybody or for a commit."""
        return not (self._open or self._strays or any(self._leftovers.values()))

    # --- how one begins

    def on_failed(self, msg: SlotFailedMsg) -> None:
        """The user's code raised."""
        if msg.call not in self._calls:  # its worker waits for a cancel; calls are numbered across all models
            for number in self._models:
                self._strays.add((number, msg.call, msg.role))
                self._out.send(msg.role, CancelMsg(number, msg.call, msg.call))
            return
        call = self._calls[msg.call]
        number = call.model
        if number in self._open:
            self._open[number].failed.append(msg)  # another call than the one being cancelled may have failed beside it
            return
        first, last, iteration = msg.call, msg.call, None
        if not call.event.inference:
            iteration = call.iteration
            first, last = self._calls_from(number, iteration)
        calls = self._calls_that_go(number, first, last, iteration)
        unfinished = self._models[number].unfinished_steps()
        steps = () if iteration is None else tuple(step for step in unfinished if step >= iteration)
        self._out.add(ReportFailure(number, msg.call, len(call.event.inputs), msg.error, calls, steps, msg.slot))
        self._begin(number, first, last, iteration)

    def on_abandon(self, event: AbandonEvent) -> None:
        """Nobody wants what still runs."""
        number = event.model
        running = [call for call in self._calls.of_model(number) if call.is_running]
        training = [call.iteration for call in running if not call.event.inference]
        if not event.sealed:
            training = [iteration for iteration in training if iteration == self._models[number].iteration]
        if number in self._open:
            return
        inference = [call.number for call in running if call.event.inference]
        if training:
            first, last = self._calls_from(number, min(training))
            self._begin(number, first, last, min(training), abandoned=True)
        elif inference:
            self._begin(number, inference[0], inference[0], None, abandoned=True)

    def on_role_failed(self, msg: RoleFailedMsg) -> None:
        """The optimizer cannot go on with a model: its next weights never come, and the slots of others wait behind its
        own. One cancel is one call where only evaluations run: the next one follows when it is over."""
        if msg.role == OPTIMIZER and msg.model in self._models:  # else it is being loaded
            self._given_up.add(msg.model)
            self.on_abandon(AbandonEvent(msg.model, sealed=True))

    def _calls_that_go(self, number: int, first: int, last: int, iteration: int | None) -> tuple[int, ...]:
        """Those from `first` to `last` that are cancelled, and what an older controller has left of the iteration."""
        kept = () if iteration is None else self._models[number].iterations[iteration].kept
        found = [c.number for c in self._calls.of_model(number) if first <= c.number <= last and c.can_fail]
        return (*kept, *found)

    def _calls_from(self, number: int, iteration: int) -> tuple[int, int]:
        """First and last call of a model from an iteration on."""
        last = max(call.number for call in self._calls.of_model(number))
        return self._models[number].iterations[iteration].first_call, last

    def _begin(self, number: int, first: int, last: int, iteration: int | None, *, abandoned: bool = False) -> None:
        waits_for = {*self._roster.living, OPTIMIZER}
        self._open[number] = Cancel(first, last, iteration, abandoned, waits_for)
        self.check(self._models[number])
        self._out.send_all(CancelMsg(number, first, last))

    def check(self, model: Model) -> None:
        """A dead attempt may have handed over the last gradients of an iteration that fails when it is tried again."""
        cancel = self._open.get(model.number)
        if cancel is None or cancel.iteration is None or cancel.abandoned:
            return
        done = [step for step, found in model.iterations.items() if found.done is not None]
        taken = [step for step in done if step >= cancel.iteration]
        if taken:
            reason = f"step {taken[0]} was taken before its iteration failed, so the weights cannot be put back"
            self._out.add(EndRun(reason))

    # --- how it ends

    def on_cancelled(self, msg: CancelledMsg) -> None:
        """Somebody runs nothing of it any more."""
        stray = (msg.model, msg.first_call, msg.role)
        cancel = self._open.get(msg.model)
        if stray in self._strays:
            self._strays.discard(stray)
            self._out.free(msg.extents)
        elif cancel is not None and msg.first_call == cancel.first_call and msg.role in cancel.waits_for:
            cancel.extents += msg.extents
            self._stop_waiting(msg.model, msg.role)

    def forget_worker(self, role: str) -> None:
        """A worker has died and will not answer."""
        self._strays = {stray for stray in self._strays if stray[2] != role}
        for number in self._models:
            self._stop_waiting(number, role)

    def _stop_waiting(self, number: int, role: str) -> None:
        cancel = self._open.get(number)
        if cancel is not None:
            cancel.waits_for.discard(role)
            if not cancel.waits_for:
                self._clear(number, cancel)

    def _clear(self, number: int, cancel: Cancel) -> None:
        """Everybody has answered."""
        model = self._models[number]
        calls = {call.number for call in self._calls.of_model(number) if call.number in cancel and call.can_fail}
        self._drop_work(number, cancel, calls)
        if cancel.iteration is not None:
            model.rewind(cancel.iteration)
            self._checkpoints.drop_after(number, cancel.iteration)
            model.versions.retire(model.version_read())
        self._calls.remove(calls)
        del self._open[number]
        self._out.add(FinishCancel(number, model.iteration))
        for msg in cancel.failed:
            if msg.call in self._calls:
                self.on_failed(msg)
        if number in self._given_up:
            self.on_abandon(AbandonEvent(number, sealed=True))

    def _drop_work(self, number: int, cancel: Cancel, calls: set[int]) -> None:
        """Forget all slots and keys of cancelled calls; every extent is freed once, whoever named it.

        An extent of a held commit may lie under a key of a call that goes on and is not committed yet: then it waits.
        """
        slots, leftovers = self._slots.of_calls(calls), self._leftovers.pop(number, {})
        readers = [*slots, *leftovers]
        roots = {key for reader in readers for key in self._slots.unpublished(reader) if key[1] not in calls}
        written: list[Extent] = []
        for slot in filter(self._slots.is_held, slots):
            for found in self._slots[slot].written.values():
                written += found
        for extents in leftovers.values():
            written += extents
        left: Leftover = ("left", number, min(calls, default=0))
        for key in sorted(roots):
            self._lifetimes.hold(key, left)
        for slot in slots:
            self._slots.forget(slot)
        freed = [*cancel.extents]
        readers += [("open", call) for call in sorted(calls)]
        freed += self._lifetimes.withdraw(readers, self._calls.keys(calls))
        live = self._lifetimes.live_extents().union(freed)
        written = [extent for extent in dict.fromkeys(written) if extent not in live]
        if roots:
            self._leftovers[number] = {left: tuple(written)}
        else:
            freed += written
        self._out.free(dict.fromkeys(freed))

    def free_leftovers(self, number: int) -> None:
        """A slot of this model has committed: what waited for it may go."""
        leftovers = self._leftovers.get(number, {})
        for reader in [reader for reader in leftovers if not self._lifetimes.unpublished(reader)]:
            live = self._lifetimes.live_extents()
            self._out.free(extent for extent in leftovers.pop(reader) if extent not in live)
            self._lifetimes.release(reader)

    def forget_model(self, number: int) -> None:
        """A model is being removed; whoever does not answer may still have something, which comes when he does."""
        self._leftovers.pop(number, None)
        self._given_up.discard(number)
        cancel = self._open.pop(number, None)
        if cancel is not None:
            self._strays |= {(number, cancel.first_call, role) for role in cancel.waits_for if role != OPTIMIZER}
            self._out.free(cancel.extents)

    def validate(self) -> None:
        """Every cancel waits for somebody who can answer, and what is left over waits for something (tests)."""
        for number, cancel in self._open.items():
            assert number in self._models
            assert cancel.waits_for and cancel.waits_for <= {*self._roster.living, OPTIMIZER}
        for number, leftovers in self._leftovers.items():
            assert number in self._models
            assert all(self._lifetimes.unpublished(reader) for reader in leftovers)
