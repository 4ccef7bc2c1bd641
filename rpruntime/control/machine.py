"""The controller's brain: calls and peers' messages in, instructions out. No sockets, clock, torch or threads.

What it owns: the open iteration of each model, the round-robin pointer, the slots in flight and the lifetimes of all
data. It never waits: tasks go out at once and the peers' events order them.

    call ----> CallMsg, inputs, tasks ----> workers --(losses, commits)--> FinishCall
    tasks ---> those of a call that has no plan, as they are submitted --> FinishTask, at the end FinishCall
    step ----> StepMsg -------------------> optimizer -(weights, done)---> FinishStep
    failure -> CancelMsg to everybody ----> CancelledMsg from everybody -> FinishCancel
    death ---> FenceMsg to everybody; the dead worker's slots ----> other workers (docs/faults.md)
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rpruntime.control.coverage import Coverage, TaskOrder
from rpruntime.control.events import (
    AbandonEvent,
    CallEvent,
    DiscardEvent,
    DropSave,
    EndRun,
    FinishCall,
    FinishCancel,
    FinishStep,
    FinishTask,
    FreeOwn,
    Instruction,
    KeepOpenEvent,
    ModelAddedEvent,
    ModelFoundEvent,
    ModelLoadingEvent,
    ModelRemovedEvent,
    ModelUndoneEvent,
    NoteRedone,
    NoteShortage,
    NoteTimes,
    OutputTakenEvent,
    ReleaseOwner,
    ReportFailure,
    RestoreEvent,
    SaveEvent,
    SaveOverEvent,
    Send,
    SetScalerEvent,
    StepEvent,
    TasksEvent,
)
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.roster import Roster
from rpruntime.control.tasks import CallTasks, plan_call, plan_tasks, slabs_in_order
from rpruntime.errors import WorkerDied
from rpruntime.rounding import rounded_to_single
from rpruntime.store.handle import Extent, Payload, by_owner, role_of
from rpruntime.wire.messages import (
    AdoptMsg,
    CallMsg,
    CancelledMsg,
    CancelMsg,
    DataReadyMsg,
    DiscardMsg,
    ErrorInfo,
    ExpectSlabsMsg,
    FencedMsg,
    FenceMsg,
    FreeMsg,
    Key,
    LoadModelMsg,
    LossReadyMsg,
    RoleDiedMsg,
    RoleReadyMsg,
    SetScalerMsg,
    SlabDoneMsg,
    SlabReadyMsg,
    SlotCommittedMsg,
    SlotFailedMsg,
    SlotTask,
    SnapshotEndMsg,
    SnapshotMsg,
    StepDoneMsg,
    StepMsg,
    TaskMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)
from rpruntime.wire.succession import Buffers, KeepOpenMsg, ModelState, NoteModelMsg, head_place

OPTIMIZER = "optimizer"
MAX_TASK_FAILURES = 2
"""The slot is blamed when so many processes have died with it running."""
SLOTS_PER_UNCHECKED_EVENT = 50
"""A check looks at every slot: with that many a second event is taken in before the next one, and so on."""
MAX_UNITS_A_MESSAGE = 1000


_SETTLING = (
    SlotCommittedMsg, StepDoneMsg, CancelledMsg, FencedMsg, RoleReadyMsg, OutputTakenEvent, ModelRemovedEvent,
    SaveOverEvent, RestoreEvent,
)  # fmt: skip
"""After these a dead process's arena may have lost its last reader."""


@dataclass
class _Call:
    event: CallEvent
    iteration: int
    open_slots: set[int]
    msg: CallMsg
    """What its workers were told."""
    slabs: dict[tuple[int, int], tuple[str, SlabReadyMsg]] = field(default_factory=dict)
    """(slot, position) -> who told the optimizer of its gradients, and the message."""
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    outputs: dict[int, Payload] = field(default_factory=dict)
    finished: bool = False
    coverage: Coverage | None = None
    """Of a call whose tasks are submitted one by one."""
    orders: dict[int, TaskOrder] = field(default_factory=dict)
    """Its tasks so far, by slot."""
    unread: dict[int, set[Key]] = field(default_factory=dict)
    """Keys of each micro-batch that are kept for tasks yet to come."""

    @property
    def is_running(self) -> bool:
        """Whether slots are open or yet to come."""
        return bool(self.open_slots) or not (self.coverage is None or self.coverage.is_complete)


@dataclass
class _Iteration:
    buffers_from: tuple[int, int]
    """(call, micro-batch) whose buffers it started with."""
    calls: list[int] = field(default_factory=list)
    """All its calls, discarded ones too."""
    kept: tuple[int, ...] = ()
    """Calls of older controllers whose sums the optimizer has."""

    @property
    def first_call(self) -> int:
        """The first call that a failure takes along."""
        return (*self.kept, *self.calls)[0]


@dataclass(frozen=True)
class _Save:
    """What a save holds: the state between step `step - 1` and step `step`."""

    step: int
    version_read: int
    """The version that iteration `step` reads."""
    buffers_from: tuple[int, int]


@dataclass(frozen=True)
class _Cancel:
    first_call: int
    last_call: int
    iteration: int | None
    """Where to rewind to; None: an inference call failed, which changes nothing."""
    abandoned: bool = False

    def __contains__(self, call: int) -> bool:
        return self.first_call <= call <= self.last_call

    """Nobody wants to go on from there, so a step that was taken meanwhile does no harm."""


@dataclass
class _Model:
    spec: ModelAddedEvent
    buffers_from: tuple[int, int]
    iterations: dict[int, _Iteration]
    """The open iteration and those whose step is not done."""
    iteration: int = 0
    base_version: int = 0
    """The oldest version that an asynchronous iteration may read: 0, or where the last failure left off."""
    first_device: int = 0
    num_microbatches: int = 0
    """Micro-batches of the open iteration so far."""
    wanted: list[int] = field(default_factory=list)
    """Calls of the open iteration whose gradients wait for the step."""
    steps: list[int] = field(default_factory=list)
    """Steps issued and not done."""
    done: deque[StepDoneMsg] = field(default_factory=deque)
    """Steps that the optimizer has done and whose calls have not all finished here."""
    versions: dict[int, list[int]] = field(default_factory=dict)
    """Published versions of each unit that are still readable, ascending; the last is the newest."""
    scales: dict[int, float] = field(default_factory=dict)
    """Version -> loss scale of the iterations that read it, as the optimizer told."""
    set_scales: dict[int, float] = field(default_factory=dict)
    """The same, where the script has set another one."""
    cancel: _Cancel | None = None
    cancel_waits_for: set[str] = field(default_factory=set)
    saves: dict[int, _Save] = field(default_factory=dict)
    step_offset: int = 0
    """Steps of the training before iteration 0 here (a resumed run; negative where versions were skipped)."""
    seed: int | None = None
    """Of a resumed run."""
    failed: list[SlotFailedMsg] = field(default_factory=list)
    """Failures reported while another is being cleared away."""
    cancel_extents: tuple[Extent, ...] = ()
    """Written for cancelled slots; a peer may read them until everybody has answered."""
    leftovers: dict[tuple[str, int, int], tuple[Extent, ...]] = field(default_factory=dict)
    """What cancelled slots have committed, under the reader that waits for the keys that they read: some of it may be
    what lies under those keys, passed on unchanged."""

    def version_read(self) -> int:
        """The version that the open iteration reads (staleness 1 when asynchronous)."""
        if not self.spec.asynchronous:
            return self.iteration
        return max(self.base_version, self.iteration - 1)


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
        self.workers = tuple(workers)
        self._roster = Roster(workers, incarnations or {}, retired)
        self._max_task_failures = max_task_failures
        self._owner = owner
        self._check = check
        self._unchecked = 0
        self._models: dict[int, _Model] = {}
        self._calls: dict[int, _Call] = {}
        self._slots: dict[int, SlotTask] = {}
        self._roles: dict[int, str] = {}
        """Who runs each of them."""
        self._moved: set[int] = set()
        """Those that went to another role than the producers of what they read were told."""
        self._late: set[int] = set()
        """Those whose producers may have been told of no reader: the controller passes on to them what they read."""
        self._waiting: dict[int, set[int]] = {}
        """Those that are not handed out before these have committed."""
        self._written: dict[int, dict[Key, dict[Extent, None]]] = {}
        """What each of them has published so far, by all its attempts."""
        self._deaths: Counter[int] = Counter()
        self._causes: dict[int, list[str]] = {}
        """Why processes died with a slot running."""
        self._loads: dict[int, LoadModelMsg] = {}
        """What a worker that starts late is told."""
        self._next_slot = first_slot
        self._lifetimes = Lifetimes()
        self._held: dict[int, SlotCommittedMsg] = {}
        """Commits that came before the commits of all that the slot read."""
        self._strays: set[tuple[int, int, str]] = set()
        """(model, call, role) of cancels that were sent for a failed slot of a call that is not known."""
        self._early_slabs: dict[int, dict[Key, None]] = {}
        """Slabs of a slot that the optimizer was done with before the slot's commit arrived."""
        self._out: list[Instruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelLoadingEvent: self._on_model_loading,
            ModelFoundEvent: self._on_model_found,
            KeepOpenEvent: self._on_keep_open,
            ModelUndoneEvent: self._on_model_undone,
            ModelAddedEvent: self._on_model_added,
            ModelRemovedEvent: self._on_model_removed,
            CallEvent: self._on_call,
            TasksEvent: self._on_tasks,
            StepEvent: self._on_step,
            DiscardEvent: self._on_discard,
            AbandonEvent: self._on_abandon,
            SetScalerEvent: self._on_set_scaler,
            OutputTakenEvent: self._on_output_taken,
            SaveEvent: self._on_save,
            SaveOverEvent: self._on_save_over,
            RestoreEvent: self._on_restore,
            LossReadyMsg: self._on_loss,
            DataReadyMsg: self._on_data,
            SlabReadyMsg: self._on_slab_ready,
            SlotCommittedMsg: self._on_committed,
            SlotFailedMsg: self._on_failed,
            CancelledMsg: self._on_cancelled,
            SlabDoneMsg: self._on_slab_done,
            WeightsReadyMsg: self._on_weights,
            StepDoneMsg: self._on_step_done,
            RoleDiedMsg: self._on_role_died,
            RoleReadyMsg: self._on_role_ready,
            FencedMsg: self._on_fenced,
        }

    def handle(self, *events: Any) -> list[Instruction]:
        """Take events in, in order; returns what is to be done about them, in order."""
        for event in events:
            self._handlers[type(event)](event)
            if self._roster.graves and type(event) in _SETTLING:
                self._settle_graves()
            if self._check:
                self._unchecked += 1
                if self._unchecked * SLOTS_PER_UNCHECKED_EVENT >= len(self._slots):
                    self.validate()
                    self._unchecked = 0
        out, self._out = self._out, []
        return out

    def understands(self, message: Any) -> bool:
        """Whether a peer's message is for this machine."""
        return type(message) in self._handlers

    # --- what the shell may ask

    @property
    def living_workers(self) -> tuple[str, ...]:
        """The workers that take part at present."""
        return self._roster.living

    @property
    def replaced_workers(self) -> tuple[str, ...]:
        """Those whose first process has died."""
        return self._roster.replaced()

    def iteration(self, model: int) -> int:
        """The open iteration of a model."""
        return self._models[model].iteration

    def step_number(self, model: int, iteration: int | None = None) -> int:
        """Steps of the whole training before an iteration (None: the open one)."""
        found = self._models[model]
        return (found.iteration if iteration is None else iteration) + found.step_offset

    def seed(self, model: int) -> int | None:
        """The seed of a resumed run; None: the model's own."""
        return self._models[model].seed

    def wanted_calls(self, model: int) -> tuple[int, ...]:
        """Calls whose gradients wait for the next step."""
        return tuple(self._models[model].wanted)

    def unfinished_steps(self, model: int) -> tuple[int, ...]:
        """Steps issued and not done."""
        return tuple(self._models[model].steps)

    def is_running(self, call: int) -> bool:
        """Whether slots of a call are open or yet to come."""
        return call in self._calls and self._calls[call].is_running

    def is_known(self, call: int) -> bool:
        """Whether a call has neither been stepped nor cancelled."""
        return call in self._calls

    @property
    def next_slot(self) -> int:
        """The number that the next slot gets."""
        return self._next_slot

    def missing_tasks(self, model: int) -> str:
        """What is still to be submitted of the open iteration's calls, in words; empty: nothing."""
        for number in self._models[model].iterations[self._models[model].iteration].calls:
            coverage = self._calls[number].coverage
            if coverage is not None and not coverage.is_complete:
                return coverage.missing()
        return ""

    def check_tasks(self, event: TasksEvent) -> Coverage:
        """What a call has with these tasks.

        Raises:
            ConfigError: one of them may not come next; names it. Nothing has changed.
        """
        known = self._calls[event.call].coverage
        assert known is not None
        coverage = known.copy()
        for order in event.tasks:
            coverage.add(order)
        return coverage

    def is_cancelling(self, model: int) -> bool:
        """Whether a failure is being cleared away."""
        return self._models[model].cancel is not None

    def newest_weights(self, model: int) -> dict[int, Extent]:
        """Where the newest published version of each unit lies."""
        found = {}
        for unit, versions in self._models[model].versions.items():
            extents = self._lifetimes.extents(("weights", model, unit, versions[-1]))
            assert extents is not None
            found[unit] = extents[0]
        return found

    def newest_buffers(self, model: int) -> dict[int, Payload]:
        """The buffers after the last step issued, by position; its calls must have finished."""
        state = self._models[model]
        return self._buffers_of(state, state.iterations[state.iteration].buffers_from)

    def _buffers_of(self, model: _Model, start: tuple[int, int]) -> dict[int, Payload]:
        found = {}
        for position, _ in model.spec.buffers:
            announced = self._lifetimes.announced(("buffer", *start, position))
            assert announced is not None
            found[position] = announced[0].payload
        return found

    def saved_weights(self, model: int, save: int) -> tuple[dict[int, Extent], dict[int, Extent]]:
        """Of a save whose units are copied: each unit's master copy, and the one that the next iteration reads (none,
        if it is the same version)."""
        state = self._models[model]
        found: list[dict[int, Extent]] = []
        for version in (state.saves[save].step, state.saves[save].version_read):
            found.append({})
            for unit in state.versions:
                extents = self._lifetimes.extents(("weights", model, unit, version))
                assert extents is not None
                found[-1][unit] = extents[0]
        return found[0], {} if state.saves[save].step == state.saves[save].version_read else found[1]

    def saved_buffers(self, model: int, save: int) -> dict[int, Payload] | None:
        """The buffers that a save holds; None: their calls have not finished."""
        state = self._models[model]
        held = state.saves[save]
        if held.step - 1 in state.steps:
            return None
        return self._buffers_of(state, held.buffers_from)

    # --- models

    def _on_model_loading(self, event: ModelLoadingEvent) -> None:
        self._loads[event.load.model] = event.load
        for role in (*self._roster.living, OPTIMIZER):
            self._send(role, event.load)

    def _on_model_found(self, event: ModelFoundEvent) -> None:
        self._loads[event.load.model] = event.load
        for role in self._roster.living:
            self._send(role, event.load)

    def _on_model_undone(self, event: ModelUndoneEvent) -> None:
        self._loads.pop(event.model, None)
        for role in (*self._roster.living, OPTIMIZER):
            self._send(role, UnloadModelMsg(event.model))

    def _on_model_added(self, event: ModelAddedEvent) -> None:
        number, start, found = event.model, (-event.model, 0), event.found
        version = 0 if found is None else found.version
        model = self._models[number] = _Model(event, start, {version: _Iteration(start)})
        if found is not None:
            self._go_on_from(model, found)
        self._on_weights(WeightsReadyMsg(number, version, tuple(enumerate(event.master)), event.loss_scale))
        self._start_from(number, model, start, event.buffers)
        if found is None:
            self._send(OPTIMIZER, NoteModelMsg(number, 0, 0, None, event.buffers))
        elif found.num_microbatches:
            self._begin_with(number, model, head_place(number), found.head)
        for role in self._roster.living:
            if found is not None or role in self._roster.replaced():  # it may have started after they were published
                self._send_weights(role, number)

    def _go_on_from(self, model: _Model, found: ModelState) -> None:
        """Counters as an older controller left them, and the version before where the open iteration reads it."""
        version = found.version
        model.iteration = model.base_version = version
        model.iterations[version].kept = found.calls
        model.wanted = list(found.calls)
        model.num_microbatches = found.num_microbatches
        model.step_offset, model.seed = found.step_offset, found.seed
        if found.previous:
            model.base_version = version - 1
            scale = dict(found.scales).get(version - 1, 1.0)
            self._on_weights(WeightsReadyMsg(found.model, version - 1, tuple(enumerate(found.previous)), scale))

    def _start_from(self, number: int, model: _Model, start: tuple[int, int], buffers: Buffers) -> None:
        """The open iteration starts with these buffers, which lie in the controller's or the optimizer's memory."""
        for position, _ in buffers:
            self._lifetimes.hold(("buffer", *start, position), ("start", number, model.iteration))
        self._begin_with(number, model, start, buffers)

    def _begin_with(self, number: int, model: _Model, place: tuple[int, int], buffers: Buffers) -> None:
        """The next call reads these buffers."""
        for position, payload in buffers:
            key: Key = ("buffer", *place, position)
            self._lifetimes.hold(key, ("head", number))
            msg = DataReadyMsg(number, key, payload)
            self._publish_own(msg)
            for worker in self._roster.living:
                self._send(worker, msg)
        self._move_head(number, model, place)

    def _on_keep_open(self, event: KeepOpenEvent) -> None:
        model = self._models[event.model]
        assert not model.steps and model.cancel is None
        buffers = tuple(sorted(self._buffers_of(model, model.buffers_from).items()))
        calls = tuple(model.wanted)
        self._send(OPTIMIZER, KeepOpenMsg(event.model, calls, model.num_microbatches, buffers))

    def _on_model_removed(self, event: ModelRemovedEvent) -> None:
        for save in list(self._models[event.model].saves):
            self._release(("save", event.model, save))
        model = self._models.pop(event.model)
        if model.cancel is not None:  # somebody does not answer; what he has comes when he does
            waits = [(event.model, model.cancel.first_call, role) for role in model.cancel_waits_for]
            self._strays.update(stray for stray in waits if stray[2] != OPTIMIZER)
            self._free(model.cancel_extents)
        for slot in [slot for slot, task in self._slots.items() if task.model == event.model]:
            self._held.pop(slot, None)
            self._forget_slot(slot)
            self._release(slot)
        for call in [number for number, call in self._calls.items() if call.event.model == event.model]:
            for key in self._lifetimes.live_keys():
                if key[0] != "weights" and key[1] == call:
                    self._drop(key)
            self._release(("open", call))
            del self._calls[call]
        for start in (model.buffers_from, *(iteration.buffers_from for iteration in model.iterations.values())):
            for position, _ in model.spec.buffers:
                self._drop(("buffer", *start, position))
        self._on_model_undone(ModelUndoneEvent(event.model))
        for key in self._lifetimes.live_keys():
            if key[:2] == ("weights", event.model):
                self._lifetimes.drop(key)  # the optimizer frees its slabs when it unloads

    # --- calls

    def _on_call(self, event: CallEvent) -> None:
        model = self._models[event.model]
        assert model.cancel is None
        assert event.inference or not self.missing_tasks(event.model)
        if event.plan is None:
            self._open_call(event, model)
            return
        workers = self._roster.expected
        tasks = self._plan(event, model, workers)
        msg = self._call_msg(event, model, tasks.buffers_from)
        self._calls[event.call] = _Call(event, model.iteration, set(tasks.slots), msg)
        self._send_call(event, msg, tasks)
        self._register(event, model, tasks)
        model.first_device = (model.first_device + len(tasks.slots)) % len(workers)
        if not event.inference:
            self._count_in(event, model)

    def _count_in(self, event: CallEvent, model: _Model) -> None:
        model.iterations[model.iteration].calls.append(event.call)
        model.wanted.append(event.call)
        model.num_microbatches += len(event.inputs)

    def _open_call(self, event: CallEvent, model: _Model) -> None:
        """A call whose tasks are yet to come."""
        msg = self._call_msg(event, model, model.buffers_from)
        active = [weight != 0 for weight in event.weights]
        buffered = frozenset(position for position, _ in model.spec.buffers)
        coverage = Coverage(len(model.spec.layer_units), active, buffered)
        call = self._calls[event.call] = _Call(event, model.iteration, set(), msg, coverage=coverage)
        self._keep_unread(call, range(len(active)))
        self._move_head(event.model, model, (event.call, len(active) - 1))
        self._publish_inputs(event)
        self._count_in(event, model)

    def _keep_unread(self, call: _Call, microbatches: Iterable[int]) -> None:
        """Hold what tasks yet to come may read, and let go of what they will not."""
        coverage, number = call.coverage, call.event.call
        assert coverage is not None
        for m in microbatches:
            has_label = call.event.labels[m] is not None
            keys = coverage.unread(number, m, call.msg.buffers_from, has_label=has_label)
            before, call.unread[m] = call.unread.get(m, set()), keys
            for key in sorted(keys - before):
                self._lifetimes.hold(key, ("open", number))
            for key in sorted(before - keys):
                self._release(("open", number), key)

    def _on_tasks(self, event: TasksEvent) -> None:
        coverage = self.check_tasks(event)
        call, model = self._calls[event.call], self._models[event.model]
        assert model.cancel is None
        call.coverage = coverage
        orders = dict(enumerate(event.tasks, self._next_slot))
        self._next_slot += len(orders)
        tasks = plan_tasks(
            call.event,
            orders,
            self._assign(orders, model),
            coverage,
            version=model.version_read(),
            grain=model.spec.grain,
            buffers_from=call.msg.buffers_from,
        )
        call.orders.update(orders)
        call.open_slots.update(orders)
        self._register_slots(call.event, model, tasks)
        self._keep_unread(call, coverage.touched(event.tasks))
        if coverage.is_complete:
            slabs, version = slabs_in_order(call.orders), model.version_read()
            self._send(OPTIMIZER, ExpectSlabsMsg(event.model, model.iteration, event.call, slabs, version))
        self._late.update(orders)
        for slot, order in orders.items():
            before = {other for other in order.after if other in self._slots}
            if before:
                self._waiting[slot] = before
            self._hand_over(slot)

    def _assign(self, orders: Mapping[int, TaskOrder], model: _Model) -> dict[int, str]:
        """Who runs each task: whom it names, or whose turn it is; for a worker that nobody replaces, another one."""
        workers, roles = self._roster.expected, {}
        for slot, order in orders.items():
            if not order.role:
                roles[slot] = workers[model.first_device % len(workers)]
                model.first_device = (model.first_device + 1) % len(workers)
            elif order.role in workers:
                roles[slot] = order.role
            else:
                roles[slot] = workers[self.workers.index(order.role) % len(workers)]
        return roles

    def _plan(self, event: CallEvent, model: _Model, workers: tuple[str, ...]) -> CallTasks:
        tasks = plan_call(
            event,
            workers,
            first_slot=self._next_slot,
            first_device=model.first_device % len(workers),
            version=model.iteration if event.inference else model.version_read(),
            grain=model.spec.grain,
            buffered=frozenset(position for position, _ in model.spec.buffers),
            buffers_from=model.iterations[model.iteration].buffers_from if event.inference else model.buffers_from,
        )
        self._next_slot += len(tasks.slots)
        return tasks

    def _register(self, event: CallEvent, model: _Model, tasks: CallTasks) -> None:
        for key in tasks.outputs:
            self._lifetimes.hold(key, ("output", event.call))
        self._register_slots(event, model, tasks)
        if not event.inference:
            self._move_head(event.model, model, (event.call, len(event.inputs) - 1))
        self._publish_inputs(event)

    def _register_slots(self, event: CallEvent, model: _Model, tasks: CallTasks) -> None:
        for slot, task in tasks.slots.items():
            self._slots[slot] = task
            self._roles[slot] = tasks.roles[slot]
            for key in tasks.reads[slot]:
                self._lifetimes.hold(key, slot)
            for position in range(*task.layers):
                for unit in model.spec.layer_units[position]:
                    self._lifetimes.hold(("weights", event.model, unit, task.version), slot)
        for key in tasks.outputs:
            self._lifetimes.hold(key, ("output", event.call))
        if not event.inference:
            self._move_head(event.model, model, (event.call, len(event.inputs) - 1))
        for slot, start, stop in tasks.slabs:
            for position in range(start, stop):
                for unit in model.spec.layer_units[position]:
                    if model.spec.units[unit].trainable:
                        self._lifetimes.hold(("slab", event.call, slot, position, unit), OPTIMIZER)

    def _publish_inputs(self, event: CallEvent) -> None:
        for m, payload in enumerate(event.inputs):
            self._publish_own(DataReadyMsg(event.model, ("act", event.call, m, 0), payload))
        for m, label in enumerate(event.labels):
            if label is not None:
                self._publish_own(DataReadyMsg(event.model, ("label", event.call, m), label))

    def _publish_own(self, msg: DataReadyMsg) -> None:
        self._lifetimes.announce(msg, self._owner)
        self._publish(msg.key, msg.payload.extents())

    def _move_head(self, number: int, model: _Model, to: tuple[int, int]) -> None:
        old, model.buffers_from = model.buffers_from, to
        for position, _ in model.spec.buffers:
            self._lifetimes.hold(("buffer", *to, position), ("head", number))
            if old != to:
                self._release(("head", number), ("buffer", *old, position))

    def _call_msg(self, event: CallEvent, model: _Model, buffers_from: tuple[int, int]) -> CallMsg:
        return CallMsg(
            call=event.call,
            model=event.model,
            iteration=model.iteration + model.step_offset,
            num_microbatches=len(event.inputs),
            first_microbatch=model.num_microbatches,
            coefficients=event.coefficients,
            weights=event.weights,
            scale=event.scale,
            training=not event.inference,
            has_labels=any(label is not None for label in event.labels),
            wants_output=event.wants_output,
            buffers_from=buffers_from,
            buffers_kept=min(iteration.buffers_from[0] for iteration in model.iterations.values()),
            context=event.context,
            seed=model.seed,
            loss_scale=None if event.inference else model.set_scales.get(model.version_read()),
        )

    def _send_call(self, event: CallEvent, call: CallMsg, tasks: CallTasks) -> None:
        for worker in self._roster.living:
            self._send(worker, call)
        if tasks.slabs:
            model = self._models[event.model]
            version = model.version_read()
            self._send(OPTIMIZER, ExpectSlabsMsg(event.model, model.iteration, event.call, tasks.slabs, version))
        for m, payload in enumerate(event.inputs):
            for role in tasks.input_readers[m]:
                self._send(role, DataReadyMsg(event.model, ("act", event.call, m, 0), payload))
        for m, label in enumerate(event.labels):
            if label is not None:
                self._send(tasks.label_readers[m], DataReadyMsg(event.model, ("label", event.call, m), label))
        for slot, task in tasks.slots.items():
            self._send(tasks.roles[slot], TaskMsg(task))

    def _on_loss(self, msg: LossReadyMsg) -> None:
        call = self._calls.get(msg.call)
        if call is not None:
            call.losses[msg.microbatch] = msg.loss
            call.metrics[msg.microbatch] = msg.metrics

    def _on_data(self, msg: DataReadyMsg) -> None:
        if msg.slot not in self._slots or msg.slot in self._held:
            return  # repeated, or cancelled
        self._write(msg.slot, msg.key, msg.payload.extents())
        if msg.key[0] == "out":
            self._calls[msg.key[1]].outputs[msg.key[2]] = msg.payload
        if not self._lifetimes.announce(msg, self._roles[msg.slot]):
            return
        slots = [reader for reader in self._lifetimes.readers(msg.key) if isinstance(reader, int)]
        for role in sorted({self._roles[slot] for slot in slots if slot in self._moved or slot in self._late}):
            self._send(role, msg)

    def _on_slab_ready(self, msg: SlabReadyMsg) -> None:
        if msg.slot not in self._slots or msg.slot in self._held:
            return
        for part in msg.parts:
            self._write(msg.slot, ("slab", msg.call, msg.slot, msg.position, part.unit), (part.extent,))
        self._calls[msg.call].slabs[msg.slot, msg.position] = (self._roles[msg.slot], msg)

    def _write(self, slot: int, key: Key, extents: Iterable[Extent]) -> None:
        """Of every attempt: somebody may read any of them."""
        self._written.setdefault(slot, {}).setdefault(key, {}).update(dict.fromkeys(extents))

    def _on_committed(self, msg: SlotCommittedMsg) -> None:
        """A slot may pass on what it read, so a commit waits until all that it read has been published: only then is
        it known which keys name an extent."""
        if msg.slot not in self._slots or msg.slot in self._held:
            return  # repeated
        model = self._models[self._slots[msg.slot].model]
        self._held[msg.slot] = msg
        while True:
            ready = [slot for slot in self._held if not self._unpublished(slot)]
            if not ready:
                break
            for slot in ready:
                self._commit(self._held.pop(slot))
        self._free_leftovers(model)

    def _unpublished(self, reader: Hashable) -> set[Key]:
        """What a reader reads, besides weights and what it writes itself, and what nobody has committed yet."""
        own = self._written.get(reader, {}) if isinstance(reader, int) else {}
        keys = self._lifetimes.reads(reader) - own.keys()
        return {key for key in keys if key[0] != "weights" and self._lifetimes.extents(key) is None}

    def _commit(self, msg: SlotCommittedMsg) -> None:
        task = self._slots[msg.slot]
        passed_on = self._may_be_passed_on(msg.slot) if msg.slot in self._moved else ()
        for key, extents in self._forget_slot(msg.slot).items():
            self._publish(key, (*extents, *passed_on) if key[0] in ("act", "buffer", "out") else extents)
        self._release(msg.slot)
        if msg.spans and task.kind != "infer":
            self._out.append(NoteTimes(task.model, msg.spans, msg.peak_bytes))
        if msg.tries > 1:
            self._out.append(NoteShortage(task.model, task.layers))
        for key in self._early_slabs.pop(msg.slot, ()):
            self._drop(key)
        call = self._calls[task.call]
        call.open_slots.discard(msg.slot)
        for slot in [slot for slot, before in self._waiting.items() if msg.slot in before]:
            self._waiting[slot].discard(msg.slot)
            if not self._waiting[slot]:
                del self._waiting[slot]
                if not self._is_cancelled(slot):
                    self._hand_over(slot)
        cancel = self._models[task.model].cancel
        if cancel is not None and task.call in cancel:
            return
        if call.coverage is not None:
            self._out.append(FinishTask(task.model, task.call, msg.slot, msg.role, msg.spans, msg.tries))
        if not call.is_running:
            self._finish_call(task.call, call)
            self._finish_steps(self._models[task.model])

    def _may_be_passed_on(self, slot: int) -> tuple[Extent, ...]:
        """Extents of all that a redone slot read: an attempt that nobody told of may have passed any on."""
        found: dict[Extent, None] = {}
        for key in sorted(key for key in self._lifetimes.reads(slot) if key[0] in ("act", "buffer")):
            found.update(dict.fromkeys(self._lifetimes.extents(key) or ()))
        return tuple(found)

    def _forget_slot(self, slot: int) -> dict[Key, dict[Extent, None]]:
        """The slot is over; returns what it has published."""
        del self._slots[slot], self._roles[slot], self._deaths[slot]
        self._moved.discard(slot)
        self._late.discard(slot)
        self._waiting.pop(slot, None)
        self._causes.pop(slot, None)
        return self._written.pop(slot, {})

    def _free_leftovers(self, model: _Model) -> None:
        for reader in [reader for reader in model.leftovers if not self._unpublished(reader)]:
            live = self._lifetimes.live_extents()
            self._free(extent for extent in model.leftovers.pop(reader) if extent not in live)
            self._release(reader)

    def _finish_call(self, number: int, call: _Call) -> None:
        count = len(call.event.inputs)
        call.finished = True
        self._out.append(
            FinishCall(
                number,
                _combined_loss(call),
                tuple(call.losses.get(m, 0.0) for m in range(count)),
                tuple(call.metrics.get(m, {}) for m in range(count)),
                call.event.weights,
                call.event.scale,
                tuple(call.outputs[m] for m in sorted(call.outputs)),
            )
        )
        if call.event.inference and not call.event.wants_output:
            del self._calls[number]

    def _on_output_taken(self, event: OutputTakenEvent) -> None:
        self._calls.pop(event.call, None)
        self._release(("output", event.call))

    # --- steps

    def _on_step(self, event: StepEvent) -> None:
        model = self._models[event.model]
        assert model.wanted and model.cancel is None
        step = model.iteration
        calls, start = tuple(model.wanted), model.buffers_from
        self._send(OPTIMIZER, StepMsg(event.model, step, calls, event.groups, event.max_grad_norm, start))
        model.steps.append(step)
        model.wanted = []
        model.num_microbatches = 0
        model.iteration += 1
        model.iterations[model.iteration] = _Iteration(model.buffers_from)
        for position, _ in model.spec.buffers:
            key: Key = ("buffer", *model.buffers_from, position)
            self._lifetimes.hold(key, ("start", event.model, model.iteration))
        for unit in model.versions:
            self._retire_versions(event.model, model, unit)

    def _on_discard(self, event: DiscardEvent) -> None:
        model = self._models[event.model]
        self._send(OPTIMIZER, DiscardMsg(event.model, tuple(model.wanted)))
        model.wanted = []

    def _on_set_scaler(self, event: SetScalerEvent) -> None:
        model = self._models[event.model]
        assert not model.wanted and not model.steps and model.cancel is None
        read, newest = model.version_read(), model.iteration
        model.set_scales = {newest: event.state.scale}
        if read < newest:
            model.set_scales[read] = event.state.scale if event.previous is None else event.previous
        self._send(OPTIMIZER, SetScalerMsg(event.model, event.state, tuple(sorted(model.set_scales.items()))))

    def _on_weights(self, msg: WeightsReadyMsg) -> None:
        model = self._models.get(msg.model)
        if model is None:
            return
        oldest = min(model.iterations) - 1  # its slots may still be handed to a replacement
        model.scales.setdefault(msg.version, msg.loss_scale)
        model.scales = {version: scale for version, scale in model.scales.items() if version >= oldest}
        for unit, extent in msg.units:
            if msg.version <= model.versions.get(unit, [-1])[-1]:
                continue  # repeated; version 0 was known from loading
            key: Key = ("weights", msg.model, unit, msg.version)
            self._lifetimes.hold(key, ("readable", msg.model))
            self._publish(key, (extent,))
            model.versions.setdefault(unit, []).append(msg.version)
            self._retire_versions(msg.model, model, unit)

    def _retire_versions(self, number: int, model: _Model, unit: int) -> None:
        """Let go of versions that are not the newest and that neither the open nor a later iteration reads."""
        versions = model.versions[unit]
        while len(versions) > 1 and versions[0] < model.version_read():
            self._release(("readable", number), ("weights", number, unit, versions.pop(0)))

    def _on_slab_done(self, msg: SlabDoneMsg) -> None:
        for slab in msg.slabs:
            key: Key = ("slab", *slab)
            if slab[1] in self._slots:
                self._early_slabs.setdefault(slab[1], {})[key] = None
            else:
                self._drop(key)  # without extents where nothing there got a gradient

    def _on_step_done(self, msg: StepDoneMsg) -> None:
        model = self._models.get(msg.model)
        if model is not None and msg.step in model.steps and all(done.step != msg.step for done in model.done):
            model.done.append(msg)
            self._check_cancel(model)
            self._finish_steps(model)

    def _check_cancel(self, model: _Model) -> None:
        """A dead attempt may have handed over the last gradients of an iteration that fails when it is tried again."""
        cancel = model.cancel
        if cancel is not None and cancel.iteration is not None and not cancel.abandoned:
            taken = [done.step for done in model.done if done.step >= cancel.iteration]
            if taken:
                self._out.append(
                    EndRun(f"step {taken[0]} was taken before its iteration failed, so the weights cannot be put back")
                )

    def _finish_steps(self, model: _Model) -> None:
        """A step's gradients can overtake the commits of the slots that they came from: it finishes after both."""
        while model.done:
            msg = model.done[0]
            if model.cancel is not None and model.cancel.abandoned and msg.step >= (model.cancel.iteration or 0):
                return
            calls = model.iterations[msg.step].calls
            if any(self._calls[call].open_slots for call in calls):
                return
            model.done.popleft()
            model.steps.remove(msg.step)
            self._release(("start", msg.model, msg.step))
            del model.iterations[msg.step]
            for call in calls:
                del self._calls[call]
            self._out.append(FinishStep(msg.model, msg))

    # --- checkpoints

    def _on_save(self, event: SaveEvent) -> None:
        model = self._models[event.model]
        assert model.cancel is None
        start = model.iterations[model.iteration].buffers_from
        held = model.saves[event.save] = _Save(model.iteration, model.version_read(), start)
        reader = ("save", event.model, event.save)
        for unit in model.versions:
            for version in (held.version_read, held.step):
                self._lifetimes.hold(("weights", event.model, unit, version), reader)
        for position, _ in model.spec.buffers:
            self._lifetimes.hold(("buffer", *start, position), reader)
        self._send(OPTIMIZER, SnapshotMsg(event.model, event.save, held.step, event.room_bytes))

    def _on_save_over(self, event: SaveOverEvent) -> None:
        model = self._models.get(event.model)
        if model is not None and model.saves.pop(event.save, None) is not None:
            self._release(("save", event.model, event.save))
            self._send(OPTIMIZER, SnapshotEndMsg(event.model, event.save))

    def _on_restore(self, event: RestoreEvent) -> None:
        """Two iterations are skipped, so that the versions of the new weights are numbers that nobody has met."""
        model = self._models[event.model]
        assert not model.wanted and not model.steps and model.cancel is None
        number, step = event.model, self.step_number(event.model)
        old = model.iteration
        for call in model.iterations.pop(old).calls:
            del self._calls[call]
        model.iteration += 2
        model.num_microbatches = 0
        model.base_version = model.iteration - int(event.previous)
        model.step_offset = (step if event.step is None else event.step) - model.iteration
        model.seed = model.seed if event.seed is None else event.seed
        start = (event.call, 0)
        model.iterations[model.iteration] = _Iteration(start)
        self._start_from(number, model, start, event.buffers)
        self._release(("start", number, old))
        self._send(OPTIMIZER, NoteModelMsg(number, model.iteration, model.step_offset, model.seed, event.buffers))

    # --- failures

    def _on_failed(self, msg: SlotFailedMsg) -> None:
        call = self._calls.get(msg.call)
        if call is None:  # its worker waits for a cancel; calls are numbered across all models
            for number in self._models:
                self._strays.add((number, msg.call, msg.role))
                self._send(msg.role, CancelMsg(number, msg.call, msg.call))
            return
        number = call.event.model
        model = self._models[number]
        if model.cancel is not None:
            model.failed.append(msg)  # another call than the one being cancelled may have failed beside it
            return
        first, last, iteration = msg.call, msg.call, None
        if not call.event.inference:
            iteration = call.iteration
            first, last = self._calls_from(number, iteration)
        calls = self._calls_that_go(number, first, last, iteration)
        steps = () if iteration is None else tuple(step for step in model.steps if step >= iteration)
        self._out.append(ReportFailure(number, msg.call, len(call.event.inputs), msg.error, calls, steps, msg.slot))
        self._cancel(number, model, _Cancel(first, last, iteration))

    def open_calls(self, number: int) -> tuple[int, ...]:
        """Calls that go with the model's open iteration when it is given up: evaluations issued since it began too."""
        iteration = self._models[number].iteration
        return self._calls_that_go(number, *self._calls_from(number, iteration), iteration)

    def _calls_that_go(self, number: int, first: int, last: int, iteration: int | None) -> tuple[int, ...]:
        """Those from `first` to `last` that are cancelled, and what an older controller has left of the iteration."""
        kept = () if iteration is None else self._models[number].iterations[iteration].kept
        return (*kept, *(c for c in self._calls if first <= c <= last and self._can_fail(c, number)))

    def _calls_from(self, number: int, iteration: int) -> tuple[int, int]:
        """First and last call of a model from an iteration on."""
        last = max(c for c, other in self._calls.items() if other.event.model == number)
        return self._models[number].iterations[iteration].first_call, last

    def _on_abandon(self, event: AbandonEvent) -> None:
        number = event.model
        model = self._models[number]
        running = [c for c, call in self._calls.items() if call.event.model == number and call.is_running]
        training = [self._calls[c].iteration for c in running if not self._calls[c].event.inference]
        if not event.sealed:
            training = [iteration for iteration in training if iteration == model.iteration]
        if model.cancel is not None:
            return
        if training:
            first, last = self._calls_from(number, min(training))
            self._cancel(number, model, _Cancel(first, last, min(training), abandoned=True))
        elif any(self._calls[c].event.inference for c in running):
            calls = [c for c in running if self._calls[c].event.inference]
            self._cancel(number, model, _Cancel(calls[0], calls[0], None, abandoned=True))

    def _cancel(self, number: int, model: _Model, cancel: _Cancel) -> None:
        model.cancel = cancel
        model.cancel_waits_for = {*self._roster.living, OPTIMIZER}
        self._check_cancel(model)
        for role in (*self._roster.living, OPTIMIZER):
            self._send(role, CancelMsg(number, cancel.first_call, cancel.last_call))

    def _on_cancelled(self, msg: CancelledMsg) -> None:
        stray = (msg.model, msg.first_call, msg.role)
        if stray in self._strays:
            self._strays.discard(stray)
            self._free(msg.extents)
            return
        model = self._models.get(msg.model)
        if model is None or model.cancel is None or msg.first_call != model.cancel.first_call:
            return
        if msg.role not in model.cancel_waits_for:
            return
        model.cancel_extents += msg.extents
        self._stop_waiting(msg.model, model, msg.role)

    def _stop_waiting(self, number: int, model: _Model, role: str) -> None:
        model.cancel_waits_for.discard(role)
        if model.cancel is not None and not model.cancel_waits_for:
            self._clear_cancelled(number, model, model.cancel)

    def _can_fail(self, number: int, model: int) -> bool:
        """Whether a call goes with a failed iteration: one of inference whose outputs are being fetched does not."""
        call = self._calls[number]
        return call.event.model == model and not (call.event.inference and call.finished)

    def _clear_cancelled(self, number: int, model: _Model, cancel: _Cancel) -> None:
        calls = {c for c in self._calls if c in cancel and self._can_fail(c, number)}
        self._drop_work(number, model, calls)
        if cancel.iteration is not None:
            self._rewind(number, model, cancel.iteration)
            model.done = deque(done for done in model.done if done.step < cancel.iteration)
        for call in calls:
            del self._calls[call]
        model.cancel = None
        self._out.append(FinishCancel(number, model.iteration))
        failed, model.failed = model.failed, []
        for msg in failed:
            if msg.call in self._calls:
                self._on_failed(msg)

    def _drop_work(self, number: int, model: _Model, calls: set[int]) -> None:
        """Forget all slots and keys of cancelled calls; every extent is freed once, whoever named it.

        An extent of a held commit may lie under a key of a call that goes on and is not committed yet: then it waits.
        """
        slots = [slot for slot, task in self._slots.items() if task.call in calls]
        readers = [*slots, *model.leftovers]
        roots = {key for reader in readers for key in self._unpublished(reader) if key[1] not in calls}
        written: list[Extent] = []
        for slot in [slot for slot in slots if self._held.pop(slot, None) is not None]:
            for found in self._written.get(slot, {}).values():
                written += found
        for extents in model.leftovers.values():
            written += extents
        model.leftovers = {}
        freed = list(model.cancel_extents)
        model.cancel_extents = ()
        left: tuple[str, int, int] = ("left", number, min(calls, default=0))
        for key in sorted(roots):
            self._lifetimes.hold(key, left)
        for slot in slots:
            self._forget_slot(slot)
            self._early_slabs.pop(slot, None)
        for reader in [*readers, *(("open", call) for call in sorted(calls))]:
            freed += self._lifetimes.release(reader)
        for key in self._lifetimes.live_keys():
            if key[0] != "weights" and key[1] in calls:
                freed += self._lifetimes.drop(key)
        live = self._lifetimes.live_extents().union(freed)
        written = [extent for extent in dict.fromkeys(written) if extent not in live]
        if roots:
            model.leftovers[left] = tuple(written)
        else:
            freed += written
        self._free(dict.fromkeys(freed))

    def _rewind(self, number: int, model: _Model, iteration: int) -> None:
        """Counters and buffers as after step `iteration - 1`."""
        start = model.iterations[iteration].buffers_from
        self._move_head(number, model, start)
        for later in [t for t in model.iterations if t > iteration]:
            del model.iterations[later]
            self._release(("start", number, later))
        model.iterations[iteration] = _Iteration(start)
        model.steps = [step for step in model.steps if step < iteration]
        model.wanted = []
        model.num_microbatches = 0
        model.iteration = iteration
        model.base_version = iteration
        for save in [save for save, held in model.saves.items() if held.step > iteration]:
            del model.saves[save]
            self._release(("save", number, save))
            self._out.append(DropSave(number, save))
        for unit in model.versions:
            self._retire_versions(number, model, unit)

    # --- deaths of workers (docs/faults.md)

    def _on_role_died(self, msg: RoleDiedMsg) -> None:
        had_work = not self._roster.is_away(msg.role)
        if not self._roster.bury(msg.role, msg.incarnation, msg.restarts, self._calls):
            return
        for by in (*self._roster.to_fence(), OPTIMIZER):
            self._fence(by, msg.role)
        self._strays = {stray for stray in self._strays if stray[2] != msg.role}
        for number, model in self._models.items():
            self._stop_waiting(number, model, msg.role)
        self._blame(msg)
        if not self._roster.expected:
            self._out.append(EndRun(f"no worker is left: {msg.role} (pid {msg.pid}) died: {msg.reason}"))
            return
        self._announce_again(msg.role)
        self._redo(msg.role, note=had_work or self._roster.is_retired(msg.role))

    def _fence(self, by: str, role: str) -> None:
        self._roster.fence(by, role)
        msg = FenceMsg(role, self._roster.incarnation(role), self._roster.is_retired(role))
        self._out.append(Send(by, msg))

    def _blame(self, msg: RoleDiedMsg) -> None:
        """Count the death against the slots that were running; one too many fails the call."""
        for slot in msg.slots:
            if slot not in self._slots or slot in self._held or self._is_cancelled(slot):
                continue
            self._deaths[slot] += 1
            self._causes.setdefault(slot, []).append(f"{msg.role} (pid {msg.pid}): {msg.reason}")
            if self._deaths[slot] >= self._max_task_failures:
                task = self._slots[slot]
                here = msg if slot == msg.slots[-1] else replace(msg, phase="", layer=-1, microbatch=-1)
                self._on_failed(SlotFailedMsg(slot, task.call, msg.role, self._error(task, here)))

    def _error(self, task: SlotTask, msg: RoleDiedMsg) -> ErrorInfo:
        causes = self._causes[task.slot]
        first, last = task.layers[0], task.layers[1] - 1
        where = f"layer {first}" if first == last else f"layers {first} to {last}"
        count = "a process" if len(causes) == 1 else f"{len(causes)} processes"
        text = f"{where} ({task.kind}) ended {count} and will not be tried again; first {causes[0]}"
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

    def _is_cancelled(self, slot: int) -> bool:
        task = self._slots[slot]
        cancel = self._models[task.model].cancel
        if any(failed.slot == slot for failed in self._models[task.model].failed):
            return True  # its turn comes when another cancel is over
        return cancel is not None and task.call in cancel

    def _redo(self, role: str, *, note: bool = True) -> None:
        """Hand out again what a dead worker has not committed, lowest number first."""
        slots = [s for s, r in self._roles.items() if r == role and s not in self._held and not self._is_cancelled(s)]
        complete, count, targets = [], 0, self._roster.expected
        for index, slot in enumerate(sorted(slots)):
            task = self._slots[slot]
            left = tuple(m for m in task.microbatches if not self._is_finished(task, m))
            if task.microbatches and not left:
                complete.append(slot)
                continue
            self._slots[slot] = replace(task, microbatches=left, attempt=self._deaths[slot])
            self._roles[slot] = targets[index % len(targets)]
            self._moved.add(slot)
            count += len(left)
            self._hand_over(slot)
        if note and len(slots) > len(complete):
            self._out.append(NoteRedone(role, len(slots) - len(complete), count, targets))
        for slot in complete:
            self._on_committed(SlotCommittedMsg(slot, role))

    def _is_finished(self, task: SlotTask, m: int) -> bool:
        """Whether everything that a micro-batch publishes is there; sums of gradients died with the process."""
        call = self._calls[task.call]
        if task.kind in ("fused", "backward"):
            return False
        expected: list[Key] = [("act", task.call, m, position) for position, _ in task.publish]
        if task.kind == "forward":
            buffered = {position for position, _ in self._models[task.model].spec.buffers}
            expected += [("buffer", task.call, m, p) for p in range(*task.layers) if p in buffered]
        elif task.layers[1] == len(self._models[task.model].spec.layer_units):
            if not call.event.wants_output:
                return m in call.losses
            expected.append(("out", task.call, m))
        written = self._written.get(task.slot, {})
        return all(key in written for key in expected)

    def _hand_over(self, slot: int) -> None:
        """Everything that a role needs to run a slot, besides weights; it may know some of it."""
        task, role = self._slots[slot], self._roles[slot]
        if self._roster.is_away(role) or slot in self._waiting:
            return  # when it joins, or when what it waits for has committed
        self._send(role, self._calls[task.call].msg)
        self._send(role, TaskMsg(task))
        for key in sorted(self._lifetimes.reads(slot)):
            announced = self._lifetimes.announced(key)
            if announced is not None:
                self._send(role, announced[0])

    def _announce_again(self, role: str) -> None:
        """What a dead worker published may not have reached everybody."""
        for key in self._lifetimes.live_keys():
            announced = self._lifetimes.announced(key)
            if announced is None or announced[1] != role:
                continue
            readers = [self._roles[r] for r in self._lifetimes.readers(key) if isinstance(r, int) and r in self._roles]
            roles = (*self._roster.living, OPTIMIZER) if key[0] == "buffer" else tuple(sorted(set(readers)))
            for reader in roles:
                self._send(reader, announced[0])
        for call in self._calls.values():
            for by, msg in call.slabs.values():
                if by == role:
                    self._send(OPTIMIZER, msg)

    def _on_role_ready(self, msg: RoleReadyMsg) -> None:
        if not self._roster.ready(msg.role, msg.incarnation):
            return
        for other in self._roster.replaced():
            if other != msg.role:
                self._fence(msg.role, other)
        self._join()

    def _on_fenced(self, msg: FencedMsg) -> None:
        self._roster.fenced(msg.by, msg.role, msg.incarnation)
        self._join()

    def _join(self) -> None:
        """Tell replacements all that the others know; from now on they take part."""
        for role in self._roster.joining():
            self._roster.join(role)
            for load in self._loads.values():
                self._send(role, load)
            for number in self._models:
                self._send_weights(role, number)
            for key in self._lifetimes.live_keys():
                announced = self._lifetimes.announced(key)
                if key[0] == "buffer" and announced is not None:
                    self._send(role, announced[0])
            for slot in sorted(slot for slot, r in self._roles.items() if r == role and slot not in self._held):
                if not self._is_cancelled(slot):
                    self._hand_over(slot)
        for role in self.workers:  # what waited for a replacement that others have overtaken
            if self._roster.living and self._roster.is_away(role):
                self._redo(role)

    def _send_weights(self, role: str, number: int) -> None:
        by_version: dict[int, list[tuple[int, Extent]]] = {}
        for key in self._lifetimes.live_keys():
            extents = self._lifetimes.extents(key)
            if key[:2] == ("weights", number) and extents is not None:
                by_version.setdefault(key[3], []).append((key[2], extents[0]))
        scales = self._models[number].scales
        for version, units in sorted(by_version.items()):
            for start in range(0, len(units), MAX_UNITS_A_MESSAGE):
                part = tuple(units[start : start + MAX_UNITS_A_MESSAGE])
                self._send(role, WeightsReadyMsg(number, version, part, scales.get(version, 1.0)))

    def _settle_graves(self) -> None:
        owners = {extent.owner for extent in self._lifetimes.live_extents()}
        of_buffers = {key[1] for key in self._lifetimes.live_keys() if key[0] == "buffer"}  # read by later calls too
        for grave in self._roster.silent_graves(of_buffers.union(self._calls), owners):
            for owner in grave.owners:
                if self._roster.is_retired(grave.role):
                    self._out.append(ReleaseOwner(owner))
                else:
                    self._send(grave.role, AdoptMsg(owner))

    # --- plumbing

    def _send(self, role: str, msg: Any) -> None:
        if not self._roster.is_away(role):  # a replacement is told everything when it joins
            self._out.append(Send(role, msg))

    def _publish(self, key: Key, extents: Iterable[Extent]) -> None:
        self._free(self._lifetimes.publish(key, extents))

    def _release(self, reader: Any, key: Key | None = None) -> None:
        self._free(self._lifetimes.release(reader, key))

    def _drop(self, key: Key) -> None:
        self._free(self._lifetimes.drop(key))

    def _free(self, extents: Iterable[Extent]) -> None:
        for owner, freed in by_owner(extents).items():
            if owner == self._owner:
                self._out.append(FreeOwn(freed))
            elif not self._roster.is_dead(owner):  # that arena goes as a whole
                self._send(role_of(owner), FreeMsg(freed))

    def validate(self) -> None:
        """Re-derive the redundant state (tests)."""
        self._lifetimes.validate()
        for slot, task in self._slots.items():
            assert slot in self._calls[task.call].open_slots
        assert self._roles.keys() == self._slots.keys()
        assert self._written.keys() | self._moved | self._held.keys() <= self._slots.keys()
        assert self._late | self._waiting.keys() <= self._slots.keys()
        assert all(before and before <= self._slots.keys() for before in self._waiting.values())
        for number, call in self._calls.items():
            assert all(self._slots[slot].call == number for slot in call.open_slots)
            self._validate_unread(number, call)
        for number, model in self._models.items():
            held = self._lifetimes.reads(("readable", number))
            assert held == {("weights", number, u, v) for u, versions in model.versions.items() for v in versions}

    def _validate_unread(self, number: int, call: _Call) -> None:
        expected: set[Key] = set()
        for m in range(len(call.event.inputs) if call.coverage is not None else 0):
            assert call.coverage is not None
            has_label = call.event.labels[m] is not None
            expected |= call.coverage.unread(number, m, call.msg.buffers_from, has_label=has_label)
        cancelled = self._models[call.event.model].cancel is not None
        assert cancelled or self._lifetimes.reads(("open", number)) == expected

    def live_extents(self) -> set[Extent]:
        """Every extent that something names."""
        return self._lifetimes.live_extents()

    def live_bytes(self) -> dict[str, int]:
        """Bytes that are named, by the kind of the key; an extent that several name counts once."""
        found: dict[str, int] = {}
        seen: set[Extent] = set()
        for key in self._lifetimes.live_keys():
            for extent in self._lifetimes.extents(key) or ():
                if extent not in seen:
                    seen.add(extent)
                    found[key[0]] = found.get(key[0], 0) + extent.nbytes
        return found


def _combined_loss(call: _Call) -> float:
    """The fp32 sum, in order, of the weighted losses (docs/numerics.md)."""
    total = 0.0
    for m in sorted(call.losses):
        if call.event.weights[m] != 0:
            numerator, denominator = call.event.coefficients[m]
            loss = call.losses[m]
            term = loss if numerator == 1 else rounded_to_single(loss * numerator)
            total = rounded_to_single(total + rounded_to_single(term / denominator))
    return total
