"""The controller's brain: calls and peers' messages in, instructions out. No sockets, clock, torch or threads.

It never waits: tasks go out at once and the peers' events order them.

    call ----> CallMsg, inputs, tasks ----> workers --(losses, commits)--> FinishCall
    tasks ---> those of a call that has no plan, as they are submitted --> FinishTask, at the end FinishCall
    step ----> StepMsg -------------------> optimizer -(weights, done)---> FinishStep
    failure -> CancelMsg to everybody ----> CancelledMsg from everybody -> FinishCancel
    death ---> FenceMsg to everybody; the dead worker's slots ----> other workers (docs/faults.md)

Each part is a class that owns its state, and is told of parts that stand before it here, never of later ones:

    Roster, Outbox                      who takes part; what goes out
    Lifetimes                           who still reads which bytes
    Models (Model, Versions)            iterations, buffers and weights of each model
    Slots, Calls                        what is in flight, and what it has given so far
    Checkpoints, Issuing                saves; how calls become slots
    Cancels, Steps, Commits, Deaths     what follows a failure, a step, a slot's end, a worker's death
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rpruntime.control.calls import Calls
from rpruntime.control.cancels import Cancels
from rpruntime.control.checkpoints import Checkpoints
from rpruntime.control.commits import Commits
from rpruntime.control.coverage import Coverage
from rpruntime.control.deaths import MAX_TASK_FAILURES, Deaths
from rpruntime.control.events import (
    AbandonEvent,
    CallEvent,
    DiscardEvent,
    Instruction,
    KeepOpenEvent,
    ModelAddedEvent,
    ModelFoundEvent,
    ModelLoadingEvent,
    ModelRemovedEvent,
    ModelUndoneEvent,
    OutputTakenEvent,
    RestoreEvent,
    SaveEvent,
    SaveOverEvent,
    SetScalerEvent,
    StepEvent,
    TasksEvent,
)
from rpruntime.control.issuing import Issuing
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import Roster
from rpruntime.control.slots import Slots
from rpruntime.control.steps import Steps
from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.messages import (
    CancelledMsg,
    DataReadyMsg,
    FencedMsg,
    LossReadyMsg,
    RoleDiedMsg,
    RoleFailedMsg,
    RoleReadyMsg,
    SlabDoneMsg,
    SlabReadyMsg,
    SlotCommittedMsg,
    SlotFailedMsg,
    StepDoneMsg,
    WeightsReadyMsg,
)

SLOTS_PER_UNCHECKED_EVENT = 50
"""A check looks at every slot: with that many a second event is taken in before the next one, and so on."""
_SETTLING = (
    SlotCommittedMsg, StepDoneMsg, CancelledMsg, FencedMsg, RoleReadyMsg, OutputTakenEvent, ModelRemovedEvent,
    SaveOverEvent, RestoreEvent,
)  # fmt: skip
"""After these a dead process's arena may have lost its last reader."""
_NOT_WHILE_CANCELLING = (
    CallEvent, TasksEvent, StepEvent, SetScalerEvent, SaveEvent, RestoreEvent, KeepOpenEvent,
)  # fmt: skip
"""The script waits for the end of a cancel before these."""


class ControllerMachine:
    """One for all models of a session.

    Args:
        workers: the workers' roles, in device order.
        owner: name under which its own arena allocates.
        max_task_failures: processes that may die with one slot running before its call fails.
        check: validate all redundant state (tests), after every event while there are few slots.
        first_slot: number of the first slot, above those of all older controllers.
        incarnations: of workers whose first process has died, as everybody knows already.
        retired: workers whom nobody will replace.
    """

    def __init__(
        self,
        workers: Sequence[str],
        owner: str = "controller.1",
        *,
        max_task_failures: int = MAX_TASK_FAILURES,
        check: bool = False,
        first_slot: int = 1,
        incarnations: Mapping[str, int] | None = None,
        retired: Iterable[str] = (),
    ):
        self._check = check
        self._unchecked = 0
        self._roster = roster = Roster(workers, incarnations or {}, retired)
        self._out = out = Outbox(roster, owner)
        self._lifetimes = lifetimes = Lifetimes(out.free)
        self._models = models = Models(roster, lifetimes, out)
        self._slots = slots = Slots(roster, lifetimes, out, first_slot)
        self._calls = calls = Calls(lifetimes, out)
        self._checkpoints = checkpoints = Checkpoints(models, calls, lifetimes, out)
        self._issuing = issuing = Issuing(roster, models, calls, slots, lifetimes, out)
        self._cancels = cancels = Cancels(roster, models, calls, slots, checkpoints, lifetimes, out)
        steps = Steps(models, calls, cancels, out)
        commits = Commits(models, calls, slots, cancels, steps, lifetimes, out)
        self._deaths = deaths = Deaths(
            max_task_failures, roster, models, calls, slots, cancels, commits, lifetimes, out
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelLoadingEvent: models.on_loading,
            ModelFoundEvent: models.on_found,
            KeepOpenEvent: models.on_keep_open,
            ModelUndoneEvent: models.on_undone,
            ModelAddedEvent: models.on_added,
            ModelRemovedEvent: self._on_model_removed,
            CallEvent: issuing.on_call,
            TasksEvent: issuing.on_tasks,
            StepEvent: steps.on_step,
            DiscardEvent: steps.on_discard,
            AbandonEvent: cancels.on_abandon,
            RoleFailedMsg: cancels.on_role_failed,
            SetScalerEvent: steps.on_set_scaler,
            OutputTakenEvent: calls.on_output_taken,
            SaveEvent: checkpoints.on_save,
            SaveOverEvent: checkpoints.on_save_over,
            RestoreEvent: checkpoints.on_restore,
            LossReadyMsg: calls.on_loss,
            DataReadyMsg: commits.on_data,
            SlabReadyMsg: commits.on_slab,
            SlotCommittedMsg: commits.on_committed,
            SlotFailedMsg: cancels.on_failed,
            CancelledMsg: cancels.on_cancelled,
            SlabDoneMsg: commits.on_slab_done,
            WeightsReadyMsg: models.on_weights,
            StepDoneMsg: steps.on_done,
            RoleDiedMsg: deaths.on_died,
            RoleReadyMsg: deaths.on_ready,
            FencedMsg: deaths.on_fenced,
        }

    def handle(self, *events: Any) -> list[Instruction]:
        """Take events in, in order; returns what is to be done about them, in order."""
        for event in events:
            assert not (type(event) in _NOT_WHILE_CANCELLING and self._cancels.is_open(event.model))
            self._handlers[type(event)](event)
            if type(event) in _SETTLING:
                self._deaths.settle_graves()
            if self._check:
                self._unchecked += 1
                if self._unchecked * SLOTS_PER_UNCHECKED_EVENT >= len(self._slots):
                    self.validate()
                    self._unchecked = 0
        return self._out.take()

    def understands(self, message: Any) -> bool:
        """Whether a peer's message is for this machine."""
        return type(message) in self._handlers

    def _on_model_removed(self, event: ModelRemovedEvent) -> None:
        """Whatever somebody still reads of it comes back with his answer to a cancel."""
        self._checkpoints.forget_model(event.model)
        self._cancels.forget_model(event.model)
        self._slots.forget_model(event.model)
        self._calls.forget_model(event.model)
        self._models.remove(event.model)

    # --- what the shell may ask

    @property
    def living_workers(self) -> tuple[str, ...]:
        """The workers that take part at present."""
        return self._roster.living

    @property
    def replaced_workers(self) -> tuple[str, ...]:
        """Those whose first process has died."""
        return self._roster.replaced()

    def has_model(self, model: int) -> bool:
        """Whether a model is there (tests)."""
        return model in self._models

    def iteration(self, model: int) -> int:
        """The open iteration of a model."""
        return self._models[model].iteration

    def version_read(self, model: int) -> int:
        """The version that the open iteration of a model reads (tests)."""
        return self._models[model].version_read()

    def step_number(self, model: int, iteration: int | None = None) -> int:
        """Steps of the whole training before an iteration (None: the open one)."""
        found = self._models[model]
        return (found.iteration if iteration is None else iteration) + found.step_offset

    def seed(self, model: int) -> int | None:
        """The seed of a resumed run; None: the model's own."""
        return self._models[model].seed

    def wanted_calls(self, model: int) -> tuple[int, ...]:
        """Calls whose gradients wait for the next step."""
        return tuple(self._models[model].open.wanted)

    def unfinished_steps(self, model: int) -> tuple[int, ...]:
        """Steps issued and not done."""
        return self._models[model].unfinished_steps()

    def is_running(self, call: int) -> bool:
        """Whether slots of a call are open or yet to come."""
        return call in self._calls and self._calls[call].is_running

    def is_known(self, call: int) -> bool:
        """Whether a call has neither been stepped nor cancelled."""
        return call in self._calls

    def open_calls(self, model: int) -> tuple[int, ...]:
        """Calls that go with the open iteration when it is given up: evaluations issued since it began too."""
        return self._cancels.open_calls(model)

    @property
    def next_slot(self) -> int:
        """The number that the next slot gets."""
        return self._slots.next_number

    def missing_tasks(self, model: int) -> str:
        """What is still to be submitted of the open iteration's calls, in words; empty: nothing."""
        return self._issuing.missing_tasks(model)

    def check_tasks(self, event: TasksEvent) -> Coverage:
        """What a call has with these tasks.

        Raises:
            ConfigError: one of them may not come next; names it. Nothing has changed.
        """
        return self._issuing.check_tasks(event)

    def is_cancelling(self, model: int) -> bool:
        """Whether a failure is being cleared away."""
        return self._cancels.is_open(model)

    def newest_weights(self, model: int) -> dict[int, Extent]:
        """Where the newest published version of each unit lies."""
        return self._models[model].versions.newest()

    def newest_buffers(self, model: int) -> dict[int, Payload]:
        """The buffers after the last step issued, by position; its calls must have finished."""
        return self._models[model].buffers(self._models[model].open.start)

    def saved_weights(self, model: int, save: int) -> tuple[dict[int, Extent], dict[int, Extent]]:
        """Of a save whose units are copied: each unit's master copy, and the one that the next iteration reads (none,
        if it is the same version)."""
        return self._checkpoints.weights(model, save)

    def saved_buffers(self, model: int, save: int) -> dict[int, Payload] | None:
        """The buffers that a save holds; None: their calls have not finished."""
        return self._checkpoints.buffers(model, save)

    def live_extents(self) -> set[Extent]:
        """Every extent that something names."""
        return self._lifetimes.live_extents()

    def live_bytes(self) -> dict[str, int]:
        """Bytes that are named, by the kind of the key; an extent that several name counts once."""
        return self._lifetimes.live_bytes()

    def validate(self) -> None:
        """Re-derive the redundant state (tests)."""
        self._lifetimes.validate()
        self._slots.validate()
        self._calls.validate()
        self._checkpoints.validate()
        self._cancels.validate()
        self._issuing.validate(set(filter(self._cancels.is_open, self._models)))
        assert all(self._calls[number].model in self._models for number in self._calls)
        opened = {(number, slot) for number in self._calls for slot in self._calls[number].open_slots}
        assert opened == {(self._slots[slot].task.call, slot) for slot in self._slots}
        for number in self._models:
            training = [call for call in self._calls.of_model(number) if not call.event.inference]
            self._models[number].validate([(call.iteration, call.number) for call in training])
