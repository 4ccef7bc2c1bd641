"""The optimizer's brain: in which order gradients are added, when a step may run, what is published.

No sockets, clock, torch or threads. Gradients are added in (call, first micro-batch, deepest position first) order
whatever order they arrive in; slot numbers ascend in that order. A step runs when every gradient of its iteration is
in, so a call that fails has moved nothing. P_cp follows each unit's step at once, into a slab that nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rpruntime.optimizer.scaling import as_dict, from_dict, inverse_of, moved
from rpruntime.rounding import rounded_to_single
from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.wire.instructions import Forget as Forget
from rpruntime.wire.instructions import FreeOwn as FreeOwn
from rpruntime.wire.instructions import Send as Send
from rpruntime.wire.messages import (
    CancelledMsg,
    CancelMsg,
    DataReadyMsg,
    DiscardMsg,
    ExpectSlabsMsg,
    FencedMsg,
    FenceMsg,
    ForgetMsg,
    FreeMsg,
    ModelFilledMsg,
    ModelSpec,
    ReadStateMsg,
    RestoredMsg,
    RestoreMsg,
    RestoreUnitMsg,
    ScalerState,
    SetScalerMsg,
    SlabDoneMsg,
    SlabPart,
    SlabReadyMsg,
    SnapshotBegunMsg,
    SnapshotEndMsg,
    SnapshotFailedMsg,
    SnapshotMsg,
    SnapshotWrittenMsg,
    StepDoneMsg,
    StepMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)
from rpruntime.wire.succession import (
    Buffers,
    ControllerGoneMsg,
    KeepOpenMsg,
    KeptMsg,
    ModelRow,
    ModelState,
    NoteModelMsg,
    ReadModelsMsg,
    ResetDoneMsg,
    ResetMsg,
    SettledMsg,
    head_place,
)

CONTROLLER = "controller"
LAUNCHER = "launcher"
ROLE = "optimizer"

_NOT_WHOLE = "its weights are not whole: the optimizer could not take a gradient or finish a step"

SlabId = tuple[int, int, int, int]
"""(call, slot, position, unit)"""


# --- from the shell


@dataclass(frozen=True)
class NormEvent:
    """The global norm of a step's unscaled gradients."""

    model: int
    step: int
    norm: float
    single: bool
    """Whether it was measured in fp32."""
    finite: bool = True
    """Whether every gradient was finite, before it was unscaled (the norm may overflow where they are)."""


@dataclass(frozen=True)
class UnitSteppedEvent:
    """A unit has been stepped and its new master copy lies in `extent` (the old one: nothing changed)."""

    model: int
    step: int
    unit: int
    extent: Extent


@dataclass(frozen=True)
class ModelFilledEvent:
    """The initial weights lie in these extents, one a unit."""

    model: int
    master: tuple[Extent, ...]


@dataclass(frozen=True)
class UnitCopiedEvent:
    """A unit has been copied for a save, into so many bytes, and its `StateMsg`s are sent."""

    model: int
    save: int
    unit: int
    nbytes: int


@dataclass(frozen=True)
class CopyFailedEvent:
    """There was no room to copy a unit for a save."""

    model: int
    save: int
    reason: str


@dataclass(frozen=True)
class UnitRestoredEvent:
    """A unit has its values from a checkpoint; `previous`: its master copy of the version before (None: none came)."""

    model: int
    request: int
    unit: int
    extent: Extent
    previous: Extent | None


@dataclass(frozen=True)
class WorkFailedEvent:
    """An instruction about a model could not be carried out: its gradients or weights are not what they should be."""

    model: int


# --- to the shell


@dataclass(frozen=True)
class BuildModel:
    """Allocate a model's slabs and build its optimizer."""

    msg: ModelSpec


@dataclass(frozen=True)
class FillModel:
    """The controller has written the initial weights."""

    model: int


@dataclass(frozen=True)
class ForgetModel:
    """Free everything of a model."""

    model: int


@dataclass(frozen=True)
class AddSlab:
    """Take a gradient slab into this process's memory (G_cp): an iteration's first one as it is, others are added."""

    model: int
    iteration: int
    part: SlabPart


@dataclass(frozen=True)
class DropSums:
    """Forget the sums of an iteration."""

    model: int
    iteration: int


@dataclass(frozen=True)
class MeasureNorm:
    """Measure the global norm of an iteration's gradients.

    They are multiplied by `inverse` first, here as in the other instructions that have it.
    """

    model: int
    iteration: int
    inverse: float = 1.0


@dataclass(frozen=True)
class StepUnit:
    """Step one unit with the gradients of iteration `step`, if it got any, and write its new master copy."""

    model: int
    step: int
    unit: int
    groups: tuple[dict[str, Any], ...]
    gradient_factor: float
    inverse: float = 1.0


@dataclass(frozen=True)
class ReadState:
    """Answer a `ReadStateMsg`, for "gradients" with those of this iteration."""

    msg: ReadStateMsg
    iteration: int
    inverse: float = 1.0


@dataclass(frozen=True)
class CopyUnit:
    """Copy a unit for a save and send the copy to the controller."""

    model: int
    save: int
    unit: int


@dataclass(frozen=True)
class FreeCopies:
    """A unit's copy has been written; None: nothing of the save is wanted any more."""

    model: int
    save: int
    unit: int | None


@dataclass(frozen=True)
class RestoreUnit:
    """Take a part of a unit's values; with the last one write its master copies (`previous`: also the one before)."""

    msg: RestoreUnitMsg
    previous: bool


@dataclass(frozen=True)
class KeepBuffers:
    """Copy a model's buffers into this process's own memory, in place of those kept before.

    `head`: they are those after the open iteration's calls, kept beside those that it started from.
    """

    model: int
    buffers: Buffers
    head: bool = False


@dataclass(frozen=True)
class TakeHead:
    """A model's kept `head` takes the place of what was kept before."""

    model: int


@dataclass(frozen=True)
class KeepOnly:
    """A controller has gone: of each model only its newest versions, the optimizer's own and what is kept stays.

    `versions`: the extents of the versions that somebody may still read, by model; `iterations`: whose sums stay.
    """

    versions: dict[int, tuple[Extent, ...]]
    iterations: dict[int, int]


@dataclass(frozen=True)
class TellModels:
    """Answer a `ReadModelsMsg`; in each state the package and the buffers are to be filled in."""

    msg: ReadModelsMsg
    rows: tuple[tuple[ModelRow, ModelState], ...]


@dataclass(frozen=True)
class StartClock:
    """A step begins."""

    model: int
    step: int


@dataclass(frozen=True)
class FinishStep:
    """Send the `StepDoneMsg`, with the seconds since `StartClock`."""

    msg: StepDoneMsg


Instruction = (
    Send | BuildModel | FillModel | ForgetModel | AddSlab | DropSums | MeasureNorm | StepUnit | ReadState | StartClock
    | FinishStep | FreeOwn | Forget | CopyUnit | FreeCopies | RestoreUnit | KeepBuffers | TakeHead
    | KeepOnly | TellModels
)  # fmt: skip


def clip_factor(limit: float, norm: float, *, single: bool) -> float:
    """As `torch.nn.utils.clip_grad_norm_` has it to the bit; `single`: the norm is fp32, and so is its arithmetic."""

    def rounded(value: float) -> float:
        return rounded_to_single(value) if single else value

    factor = rounded(rounded(1.0 / rounded(norm + rounded(1e-6))) * rounded(limit))
    return 1.0 if factor > 1 else factor  # nan stays nan, as there


@dataclass
class _Sum:
    """One unit's gradients in one iteration."""

    order: deque[SlabId] = field(default_factory=deque)
    """Slabs still to be added, in order."""
    arrived: dict[SlabId, SlabPart | None] = field(default_factory=dict)
    """Those of them that are here; None: the position got no gradient there."""


@dataclass
class _Snapshot:
    """What a save still needs of the model as it is between two steps."""

    msg: SnapshotMsg
    to_copy: deque[int]
    """Trainable units that are not copied, in the order of steps; no step of `msg.step` or later touches them."""
    begun: bool = False
    copied: dict[int, int] = field(default_factory=dict)
    """Unit -> bytes of a copy that is not written."""


@dataclass
class _Model:
    spec: ModelSpec
    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict)
    """(iteration, unit) -> its sum."""
    calls: dict[int, int] = field(default_factory=dict)
    """Call -> iteration, for calls whose gradients are wanted."""
    waiting: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Call -> (slot, position) whose gradients have not come."""
    unwanted: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Discarded call -> (slot, position) whose gradients have not come."""
    newest_call: int = 0
    """The highest call announced so far."""
    steps: deque[StepMsg] = field(default_factory=deque)
    running: StepMsg | None = None
    to_step: set[int] = field(default_factory=set)
    """Units that the running step has not published."""
    master: dict[int, Extent] = field(default_factory=dict)
    reads: list[ReadStateMsg] = field(default_factory=list)
    early: list[SlabReadyMsg] = field(default_factory=list)
    """Gradients that overtook the message announcing them."""
    late_cancels: list[CancelMsg] = field(default_factory=list)
    """Cancels of the running step's calls."""
    norm: float | None = None
    """Of the running step; None: nothing is clipped."""
    skipped: bool = False
    """Whether the running step found a gradient that is not finite."""
    scaler: ScalerState | None = None
    scales: dict[int, float] = field(default_factory=dict)
    """Version -> the scale after that many steps, for versions that may still be read."""
    read_versions: dict[int, int] = field(default_factory=dict)
    """Iteration -> the version that it reads."""
    snapshots: list[_Snapshot] = field(default_factory=list)
    copying: bool = False
    """Whether the shell is copying a unit."""
    held_back: dict[int, StepUnit] = field(default_factory=dict)
    """Units of the running step that a snapshot has to copy first."""
    restoring: RestoreMsg | None = None
    restored: set[int] = field(default_factory=set)
    """Units that have their values."""
    version: int = 0
    """Steps done, as versions are counted."""
    note: NoteModelMsg | None = None
    """What the controller said when the model was loaded, or last got new weights; None: it is still loading."""
    torn: bool = False
    """Whether weights have been announced that have not all come: nothing could go on from here."""
    failed: bool = False
    """Whether an instruction has failed: nothing is added or stepped any more, and nobody goes on from here."""
    buffers: dict[tuple[int, int], dict[int, Payload]] = field(default_factory=dict)
    """(call, micro-batch) -> position -> the buffers after it, as the workers told."""
    kept_from: tuple[int, int] = (0, 0)
    """Whose buffers are kept, or kept as those after the open iteration's calls."""
    awaits_buffers: bool = False
    """Whether the running step is done but for the buffers."""
    previous: dict[int, Extent] = field(default_factory=dict)
    """Master copies of the version before."""
    to_keep: KeepOpenMsg | None = None
    """Waits for the last gradients: the calls' ends are told by another link than they come by."""
    open: KeepOpenMsg | None = None
    """What a controller that detached has left of the open iteration."""


class OptimizerMachine:
    """One for all models of a session. `workers`: roles that want to know of new weights."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self._workers = workers
        self._models: dict[int, _Model] = {}
        self._out: list[Instruction] = []
        self._gone: ControllerGoneMsg | None = None
        """A controller that has gone and whose steps are not all done."""
        self._reset: ResetMsg | None = None
        """A reset that waits for the running step."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelSpec: self._on_load,
            UnloadModelMsg: self._on_unload,
            ModelFilledMsg: lambda msg: self._out.append(FillModel(msg.model)),
            ModelFilledEvent: self._on_filled,
            ExpectSlabsMsg: self._on_expect,
            SlabReadyMsg: self._on_slab,
            StepMsg: self._on_step,
            DiscardMsg: self._on_discard,
            CancelMsg: self._on_cancel,
            ReadStateMsg: self._on_read,
            SetScalerMsg: self._on_set_scaler,
            SnapshotMsg: self._on_snapshot,
            SnapshotWrittenMsg: self._on_snapshot_written,
            SnapshotEndMsg: self._on_snapshot_end,
            RestoreMsg: self._on_restore,
            RestoreUnitMsg: self._on_restore_unit,
            UnitCopiedEvent: self._on_unit_copied,
            CopyFailedEvent: self._on_copy_failed,
            UnitRestoredEvent: self._on_unit_restored,
            FenceMsg: self._on_fence,
            FreeMsg: lambda msg: self._out.append(FreeOwn(msg.extents)),
            ForgetMsg: lambda msg: self._out.append(Forget(msg.segments)),
            NormEvent: self._on_norm,
            UnitSteppedEvent: self._on_unit_stepped,
            WorkFailedEvent: self._on_work_failed,
            DataReadyMsg: self._on_buffers,
            NoteModelMsg: self._on_note,
            KeepOpenMsg: self._on_keep_open,
            ReadModelsMsg: self._on_read_models,
            ControllerGoneMsg: self._on_gone,
            ResetMsg: self._on_reset,
        }

    def handle(self, *events: Any) -> list[Instruction]:
        """Take messages and events in, in order; returns what is to be done, in order."""
        for event in events:
            self._handlers[type(event)](event)
            self._tell_settled()
            self._try_reset()
        out, self._out = self._out, []
        return out

    def understands(self, message: Any) -> bool:
        """Whether a peer's message is for this machine."""
        return type(message) in self._handlers

    # --- models

    def _on_load(self, msg: ModelSpec) -> None:
        scales = {} if msg.scaler is None else {0: msg.scaler.scale}
        self._models[msg.model] = _Model(msg, scaler=msg.scaler, scales=scales)
        self._out.append(BuildModel(msg))

    def _on_unload(self, msg: UnloadModelMsg) -> None:
        self._models.pop(msg.model, None)
        self._out.append(ForgetModel(msg.model))

    def _on_filled(self, event: ModelFilledEvent) -> None:
        model = self._models[event.model]
        model.master = dict(enumerate(event.master))
        self._publish(event.model, 0, tuple(model.master.items()))

    def _publish(self, model: int, version: int, units: tuple[tuple[int, Extent], ...]) -> None:
        scale = self._models[model].scales.get(version, 1.0)
        for start in range(0, len(units), 1000):  # keeps the message under its limit
            msg = WeightsReadyMsg(model, version, units[start : start + 1000], scale)
            for role in (*self._workers, CONTROLLER):
                self._send(role, msg)

    # --- gradients

    def _on_expect(self, msg: ExpectSlabsMsg) -> None:
        model = self._models[msg.model]
        model.open = None
        model.newest_call = max(model.newest_call, msg.call)
        model.calls[msg.call] = msg.iteration
        model.read_versions[msg.iteration] = msg.version
        model.waiting[msg.call] = {(slot, p) for slot, start, stop in msg.slots for p in range(start, stop)}
        for slot, start, stop in msg.slots:
            for position in reversed(range(start, stop)):
                for unit in self._trainable(model, position):
                    total = model.sums.setdefault((msg.iteration, unit), _Sum())
                    total.order.append((msg.call, slot, position, unit))
        early, model.early = model.early, []
        for slab in early:
            self._on_slab(slab)

    def _trainable(self, model: _Model, position: int) -> list[int]:
        return [unit for unit in model.spec.layers[position].units if model.spec.units[unit].trainable]

    def _on_slab(self, msg: SlabReadyMsg) -> None:
        model = self._models.get(msg.model)
        if model is None:
            return
        slabs = [(msg.call, msg.slot, msg.position, unit) for unit in self._trainable(model, msg.position)]
        place = (msg.slot, msg.position)
        if msg.call in model.unwanted:
            if place in model.unwanted[msg.call]:
                model.unwanted[msg.call].discard(place)
                self._done(slabs)
            if not model.unwanted[msg.call]:
                del model.unwanted[msg.call]
            return
        iteration = model.calls.get(msg.call)
        if iteration is None:
            if msg.call > model.newest_call:
                model.early.append(msg)
            return
        if place not in model.waiting[msg.call]:
            return  # repeated
        parts = {part.unit: part for part in msg.parts}
        for slab in slabs:
            total = model.sums[iteration, slab[3]]
            total.arrived[slab] = parts.get(slab[3])
            self._add_what_is_next(msg.model, iteration, total)
        model.waiting[msg.call].discard(place)
        self._start_step(msg.model, model)
        self._answer_reads(model)
        self._keep_open(model)

    def _add_what_is_next(self, number: int, iteration: int, total: _Sum) -> None:
        while total.order and total.order[0] in total.arrived:
            slab = total.order.popleft()
            part = total.arrived.pop(slab)
            if part is not None and not self._models[number].failed:
                self._out.append(AddSlab(number, iteration, part))
            self._done([slab])

    def _done(self, slabs: list[SlabId]) -> None:
        if slabs:
            self._send(CONTROLLER, SlabDoneMsg(tuple(slabs)))

    # --- steps

    def _on_step(self, msg: StepMsg) -> None:
        model = self._models[msg.model]
        model.open = None
        if not model.failed:
            model.steps.append(msg)
            self._start_step(msg.model, model)

    def _on_work_failed(self, event: WorkFailedEvent) -> None:
        """What was to follow is not done; the shell drops what it has been told. The controller hears why from there.

        A gradient that could not be taken would be missing in the step, and a step that ends half way has changed
        some of its weights in place.
        """
        model = self._models.get(event.model)
        if model is None:
            return
        model.failed = True
        model.running, model.awaits_buffers = None, False
        model.steps.clear()
        model.to_step.clear()
        model.held_back.clear()
        model.reads.clear()
        model.open = model.to_keep = None
        late, model.late_cancels = model.late_cancels, []
        for cancel in late:
            self._on_cancel(cancel)
        snapshots, model.snapshots = model.snapshots, []
        for snapshot in snapshots:
            self._fail_snapshot(event.model, snapshot.msg.save, _NOT_WHOLE)

    def _start_step(self, number: int, model: _Model) -> None:
        if model.running is not None or not model.steps:
            return
        msg = model.steps[0]
        if any(model.waiting[call] for call in msg.calls):
            return
        model.running = model.steps.popleft()
        model.norm, model.skipped = None, False
        self._out.append(StartClock(number, msg.step))
        if msg.max_grad_norm is None and model.scaler is None:
            self._step_units(number, model, 1.0)
        else:
            self._out.append(MeasureNorm(number, msg.step, self._inverse(model, msg.step)))

    def _scale(self, model: _Model, iteration: int) -> float:
        """That the losses of an iteration were multiplied by."""
        return 1.0 if model.scaler is None else model.scales[model.read_versions[iteration]]

    def _inverse(self, model: _Model, iteration: int) -> float:
        return 1.0 if model.scaler is None else inverse_of(self._scale(model, iteration))

    def _on_set_scaler(self, msg: SetScalerMsg) -> None:
        model = self._models[msg.model]
        model.scaler = msg.state
        model.scales.update(msg.scales)

    def _on_norm(self, event: NormEvent) -> None:
        model = self._models.get(event.model)
        if model is None or model.running is None:
            return
        step, limit = model.running.step, model.running.max_grad_norm
        if model.scaler is not None:
            model.skipped = not event.finite
            scale = self._scale(model, step)
            model.scaler = moved(model.scaler, found_inf=model.skipped, ran_under=scale)
            model.scales[step + 1] = model.scaler.scale  # before any unit of this version is published
        factor = 1.0
        if limit is not None:
            model.norm = event.norm
            factor = clip_factor(limit, event.norm, single=event.single)
        self._step_units(event.model, model, factor)

    def _step_units(self, number: int, model: _Model, factor: float) -> None:
        """All units, shallow ones first: the next forward waits for those. A skipped step publishes what there was."""
        msg = model.running
        assert msg is not None
        unchanged = [unit.index for unit in model.spec.units if model.skipped or not unit.trainable]
        inverse = self._inverse(model, msg.step)
        model.to_step = {unit.index for unit in model.spec.units}
        model.previous = dict(model.master)
        for unit in sorted((u for u in model.spec.units if u.trainable), key=lambda u: u.positions[0]):
            if model.skipped:
                continue
            step = StepUnit(number, msg.step, unit.index, msg.groups, factor, inverse)
            if self._is_to_be_copied(model, unit.index):
                model.held_back[unit.index] = step
            else:
                self._out.append(step)
        self._publish(number, msg.step + 1, tuple((unit, model.master[unit]) for unit in unchanged))
        model.to_step.difference_update(unchanged)
        self._finish_step(number, model)

    def _on_unit_stepped(self, event: UnitSteppedEvent) -> None:
        model = self._models.get(event.model)
        if model is None:
            return
        model.master[event.unit] = event.extent
        self._publish(event.model, event.step + 1, ((event.unit, event.extent),))
        model.to_step.discard(event.unit)
        self._finish_step(event.model, model)

    def _finish_step(self, number: int, model: _Model) -> None:
        msg = model.running
        if msg is None or model.to_step:
            return
        if not self._keep_buffers(number, model, msg.buffers_from) and not model.late_cancels:
            model.awaits_buffers = True  # of a call that is being cancelled they may never come
            return
        self._end_step(number, model, msg)

    def _end_step(self, number: int, model: _Model, msg: StepMsg) -> None:
        model.running, model.awaits_buffers = None, False
        model.version = msg.step + 1
        self._drop_iteration(number, model, msg.step)
        for call in msg.calls:
            del model.calls[call], model.waiting[call]
        scale = self._scale(model, msg.step)
        done = StepDoneMsg(number, msg.step, model.norm, model.skipped, 0.0, scale, model.scaler)
        self._out.append(FinishStep(done))
        model.read_versions.pop(msg.step, None)
        model.scales = {version: s for version, s in model.scales.items() if version >= msg.step}
        late, model.late_cancels = model.late_cancels, []
        for cancel in late:
            self._on_cancel(cancel)
        self._copy_next(number, model)
        self._start_step(number, model)

    def _drop_iteration(self, number: int, model: _Model, iteration: int) -> None:
        model.sums = {key: total for key, total in model.sums.items() if key[0] != iteration}
        self._out.append(DropSums(number, iteration))

    # --- gradients that are not wanted

    def _on_discard(self, msg: DiscardMsg) -> None:
        model = self._models[msg.model]
        model.open = model.to_keep = None
        if not msg.calls:
            return
        iteration = model.calls[msg.calls[0]]
        for total in (total for (t, _), total in model.sums.items() if t == iteration):
            self._done(list(total.arrived))
        self._drop_iteration(msg.model, model, iteration)
        for call in msg.calls:
            del model.calls[call]
            waiting = model.waiting.pop(call)
            if waiting:
                model.unwanted[call] = waiting

    def _on_cancel(self, msg: CancelMsg) -> None:
        model = self._models[msg.model]
        gone = [call for call in model.calls if msg.first_call <= call <= msg.last_call]
        if model.running is not None and set(model.running.calls) & set(gone):
            model.late_cancels.append(msg)  # too late: the controller will hear of the step first
            if model.awaits_buffers:
                self._finish_step(msg.model, model)
            return
        model.open = model.to_keep = None
        model.buffers = {key: b for key, b in model.buffers.items() if not msg.first_call <= key[0] <= msg.last_call}
        for iteration in {model.calls[call] for call in gone}:
            self._drop_iteration(msg.model, model, iteration)
        for call in gone:
            del model.calls[call], model.waiting[call]
        never = [step.step for step in model.steps if set(step.calls) & set(gone)]
        if never:
            model.snapshots = [snapshot for snapshot in model.snapshots if snapshot.msg.step <= min(never)]
        model.steps = deque(step for step in model.steps if step.step not in never)
        model.reads = [read for read in model.reads if not set(read.calls) & set(gone)]
        model.early = [slab for slab in model.early if not msg.first_call <= slab.call <= msg.last_call]
        for call in [call for call in model.unwanted if msg.first_call <= call <= msg.last_call]:
            del model.unwanted[call]
        model.newest_call = max(model.newest_call, msg.last_call)
        self._send(CONTROLLER, CancelledMsg(msg.model, msg.first_call, ROLE, ()))

    def _on_fence(self, msg: FenceMsg) -> None:
        """The mailbox has begun to drop what an older process of the role sends."""
        if msg.retired:
            self._workers = tuple(role for role in self._workers if role != msg.role)
        self._send(CONTROLLER, FencedMsg(msg.role, msg.incarnation, ROLE))

    # --- reading

    def _on_read(self, msg: ReadStateMsg) -> None:
        model = self._models[msg.model]
        if not model.failed:
            model.reads.append(msg)
            self._answer_reads(model)

    def _answer_reads(self, model: _Model) -> None:
        for msg in [msg for msg in model.reads if not any(model.waiting.get(call) for call in msg.calls)]:
            model.reads.remove(msg)
            iteration = model.calls[msg.calls[0]] if msg.calls else -1
            inverse = self._inverse(model, iteration) if msg.calls else 1.0
            self._out.append(ReadState(msg, iteration, inverse))

    # --- checkpoints

    def _on_snapshot(self, msg: SnapshotMsg) -> None:
        model = self._models[msg.model]
        if model.failed:
            self._send(CONTROLLER, SnapshotFailedMsg(msg.model, msg.save, _NOT_WHOLE))
            return
        units = sorted((u for u in model.spec.units if u.trainable), key=lambda u: u.positions[0])
        model.snapshots.append(_Snapshot(msg, deque(unit.index for unit in units)))
        self._copy_next(msg.model, model)

    def _copy_next(self, number: int, model: _Model) -> None:
        """Start what can be started: saves in their order, one unit at a time, while there is room."""
        earlier = [step.step for step in (model.running, *model.steps) if step is not None]
        for snapshot in model.snapshots:
            if any(step < snapshot.msg.step for step in earlier):
                return
            if not snapshot.begun:
                snapshot.begun = True
                self._send(CONTROLLER, SnapshotBegunMsg(number, snapshot.msg.save, self._scaler_state(model)))
            taken = sum(sum(other.copied.values()) for other in model.snapshots)
            if snapshot.to_copy and not model.copying and (taken == 0 or taken < snapshot.msg.room_bytes):
                model.copying = True
                self._out.append(CopyUnit(number, snapshot.msg.save, snapshot.to_copy[0]))

    def _scaler_state(self, model: _Model) -> dict[str, Any] | None:
        """The gradient scaler as the next iteration finds it; None: there is none."""
        if model.scaler is None:
            return None
        # steps since the load at least, so the version before the newest one may be missing
        before = sorted(model.scales)[-2:][0] if model.spec.asynchronous else max(model.scales)
        return as_dict(model.scaler, model.scales[before])

    def _restore_scaler(self, model: _Model, state: dict[str, Any]) -> None:
        """Take over what `_scaler_state` gave."""
        if model.scaler is not None and model.restoring is not None:
            model.scaler, previous = from_dict(state)
            version = model.restoring.version
            model.scales[version] = model.scaler.scale
            model.scales[version - 1] = model.scaler.scale if previous is None else previous

    def _is_to_be_copied(self, model: _Model, unit: int) -> bool:
        """Whether the running step has to leave a unit as it is until a save has it."""
        assert model.running is not None
        return any(unit in s.to_copy for s in model.snapshots if s.msg.step <= model.running.step)

    def _on_unit_copied(self, event: UnitCopiedEvent) -> None:
        model = self._models.get(event.model)
        if model is None:
            return
        model.copying = False
        for snapshot in model.snapshots:
            if snapshot.msg.save == event.save:
                snapshot.to_copy.remove(event.unit)
                snapshot.copied[event.unit] = event.nbytes
                break
        else:  # the save ended meanwhile
            self._out.append(FreeCopies(event.model, event.save, event.unit))
        self._go_on(event.model, model)

    def _go_on(self, number: int, model: _Model) -> None:
        """Step the units that waited for a copy and need not wait any more; copy the next ones."""
        for unit in [unit for unit in model.held_back if not self._is_to_be_copied(model, unit)]:
            self._out.append(model.held_back.pop(unit))
        self._copy_next(number, model)

    def _on_snapshot_written(self, msg: SnapshotWrittenMsg) -> None:
        model = self._models.get(msg.model)
        for snapshot in model.snapshots if model is not None else ():
            if model is not None and snapshot.msg.save == msg.save and msg.unit in snapshot.copied:
                del snapshot.copied[msg.unit]
                self._out.append(FreeCopies(msg.model, msg.save, msg.unit))
                self._copy_next(msg.model, model)

    def _on_snapshot_end(self, msg: SnapshotEndMsg) -> None:
        if msg.model in self._models:
            self._end_snapshot(msg.model, msg.save)

    def _end_snapshot(self, number: int, save: int) -> None:
        model = self._models[number]
        model.snapshots = [snapshot for snapshot in model.snapshots if snapshot.msg.save != save]
        self._out.append(FreeCopies(number, save, None))
        self._go_on(number, model)

    def _on_copy_failed(self, event: CopyFailedEvent) -> None:
        model = self._models.get(event.model)
        if model is None:
            return
        model.copying = False
        self._fail_snapshot(event.model, event.save, event.reason)

    def _fail_snapshot(self, number: int, save: int, reason: str) -> None:
        self._send(CONTROLLER, SnapshotFailedMsg(number, save, reason))
        self._end_snapshot(number, save)

    def _on_restore(self, msg: RestoreMsg) -> None:
        model = self._models[msg.model]
        assert model.running is None and not model.steps and not model.calls
        model.restoring, model.restored, model.torn = msg, set(), True
        if model.scaler is not None:  # without a state in the message it goes on where it is
            self._restore_scaler(model, msg.scaler or as_dict(model.scaler))

    def _on_restore_unit(self, msg: RestoreUnitMsg) -> None:
        restoring = self._models[msg.model].restoring
        assert restoring is not None
        self._out.append(RestoreUnit(msg, restoring.previous))

    def _on_unit_restored(self, event: UnitRestoredEvent) -> None:
        model = self._models.get(event.model)
        if model is None or model.restoring is None:
            return
        version = model.restoring.version
        model.master[event.unit] = event.extent
        model.previous[event.unit] = event.extent if event.previous is None else event.previous
        if event.previous is not None:
            self._publish(event.model, version - 1, ((event.unit, event.previous),))
        self._publish(event.model, version, ((event.unit, event.extent),))
        self._send(CONTROLLER, RestoredMsg(event.model, event.request, event.unit))
        model.restored.add(event.unit)
        if len(model.restored) == len(model.spec.units):
            model.restoring, model.torn, model.version = None, False, version

    # --- what outlives a controller (docs/client.md)

    def _buffered(self, model: _Model) -> list[int]:
        return [position for position, layer in enumerate(model.spec.layers) if layer.buffers]

    def _on_note(self, msg: NoteModelMsg) -> None:
        model = self._models[msg.model]
        model.note, model.torn, model.open = msg, msg.version != model.version, None
        # model.buffers stays: those of the first call may have come before this message, by another link
        self._out.append(KeepBuffers(msg.model, msg.buffers))

    def _on_buffers(self, msg: DataReadyMsg) -> None:
        """The buffers after a call's last micro-batch, from whoever ran it."""
        model = self._models.get(msg.model)
        if model is None or msg.key[0] != "buffer" or msg.key[1] <= model.kept_from[0]:
            return
        _, call, microbatch, position = msg.key
        model.buffers.setdefault((call, microbatch), {}).setdefault(position, msg.payload)
        if model.awaits_buffers:
            self._finish_step(msg.model, model)

    def _keep_buffers(self, number: int, model: _Model, place: tuple[int, int]) -> bool:
        """Keep the buffers with which the next iteration starts; False: some have not come."""
        positions = self._buffered(model)
        if not positions or place == model.kept_from:
            return True
        if place == head_place(number):
            self._out.append(TakeHead(number))
            model.kept_from = place
            return True
        found = model.buffers.get(place, {})
        if any(position not in found for position in positions):
            return False
        self._out.append(KeepBuffers(number, tuple((position, found[position]) for position in positions)))
        model.kept_from = place
        model.buffers = {key: buffers for key, buffers in model.buffers.items() if key[0] > place[0]}
        return True

    def _on_keep_open(self, msg: KeepOpenMsg) -> None:
        model = self._models[msg.model]
        if not model.failed:
            model.to_keep = msg
            self._keep_open(model)

    def _keep_open(self, model: _Model) -> None:
        """What a controller leaves is complete when all its gradients lie in this process's own memory."""
        msg = model.to_keep
        if msg is None or any(model.waiting[call] for call in msg.calls):
            return
        model.to_keep = None
        if msg.num_microbatches:  # else the iteration is as the step before it left it
            model.open = msg
            self._out.append(KeepBuffers(msg.model, msg.buffers, head=True))
        self._send(CONTROLLER, KeptMsg(msg.model))

    def _on_gone(self, msg: ControllerGoneMsg) -> None:
        """The mailbox has begun to drop what that controller sends."""
        self._gone = msg
        for number, model in self._models.items():
            model.reads.clear()
            for snapshot in list(model.snapshots):
                self._end_snapshot(number, snapshot.msg.save)

    def _tell_settled(self) -> None:
        if self._gone is None or any(model.running or model.steps for model in self._models.values()):
            return
        gone, self._gone = self._gone, None
        self._send(LAUNCHER, SettledMsg(gone.incarnation))

    def _on_reset(self, msg: ResetMsg) -> None:
        self._reset, self._gone = msg, None
        self._workers = tuple(role for role in self._workers if role not in msg.retired)

    def _try_reset(self) -> None:
        if self._reset is None:
            return
        for number, model in self._models.items():
            if model.running is not None and model.awaits_buffers:
                # workers have died beside the controller, and the buffers with them: those before stay
                self._end_step(number, model, model.running)
        if any(model.running is not None for model in self._models.values()):
            return
        msg, self._reset = self._reset, None
        for number, model in list(self._models.items()):
            if model.torn or model.failed or model.note is None:
                del self._models[number]
                self._out.append(ForgetModel(number))
            else:
                self._models[number] = self._reset_model(number, model)
        versions = {n: (*m.master.values(), *self._previous_of(m)) for n, m in self._models.items()}
        iterations = {n: m.version for n, m in self._models.items() if m.open is not None}
        self._out.append(KeepOnly(versions, iterations))
        self._send(LAUNCHER, ResetDoneMsg(ROLE, msg.incarnation))

    def _reset_model(self, number: int, model: _Model) -> _Model:
        """The model as the next controller finds it: at its newest version, with the sums of `open` or with none."""
        calls = dict.fromkeys(model.open.calls, model.version) if model.open is not None else {}
        assert calls.keys() <= model.calls.keys(), "kept calls that nobody knows"
        return _Model(
            model.spec,
            calls=calls,
            sums={key: total for key, total in model.sums.items() if calls and key[0] == model.version},
            waiting={call: set() for call in calls},
            newest_call=model.newest_call,
            master=model.master,
            previous=model.previous,
            scaler=model.scaler,
            scales={version: s for version, s in model.scales.items() if version >= model.version - 1},
            read_versions={model.version: model.read_versions[model.version]} if calls else {},
            version=model.version,
            note=model.note,
            kept_from=(-number, 0),  # as the next controller calls them; its head may be another one than before
            open=model.open,
        )

    def _previous_of(self, model: _Model) -> tuple[Extent, ...]:
        """Version `version - 1`, where the calls that are kept have read it: so will others of their iteration."""
        if model.version == 0 or model.read_versions.get(model.version, model.version) == model.version:
            return ()
        return tuple(model.previous.get(unit, extent) for unit, extent in model.master.items())

    def _on_read_models(self, msg: ReadModelsMsg) -> None:
        rows = []
        for number, model in self._models.items():
            if model.note is None:
                continue
            step = model.version + model.note.step_offset
            row = ModelRow(number, model.spec.name, model.version, step, len(model.calls))
            rows.append((row, self._state(number, model, model.note)))
        self._out.append(TellModels(msg, tuple(rows)))

    def _state(self, number: int, model: _Model, note: NoteModelMsg) -> ModelState:
        nowhere = TensorHandle(Extent("", "", 0, 0), 0, (), (), "")
        default = {} if model.scaler is None else {model.version: model.scaler.scale}
        scales = {version: s for version, s in model.scales.items() if version >= model.version - 1}
        return ModelState(
            model=number,
            spec=nowhere,
            version=model.version,
            step_offset=note.step_offset,
            seed=note.seed,
            scaler=model.scaler,
            scales=tuple(sorted({**default, **scales}.items())),
            master=tuple(model.master[unit.index] for unit in model.spec.units) if model.master else (),
            previous=self._previous_of(model),
            buffers=(),
            calls=() if model.open is None else model.open.calls,
            num_microbatches=0 if model.open is None else model.open.num_microbatches,
            head=(),
        )

    def _send(self, role: str, msg: Any) -> None:
        self._out.append(Send(role, msg))
