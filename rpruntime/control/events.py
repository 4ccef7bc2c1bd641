"""What goes into the controller's machine besides the peers' messages, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpruntime.control.coverage import TaskOrder
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.instructions import FreeOwn as FreeOwn
from rpruntime.wire.instructions import Send as Send
from rpruntime.wire.messages import ErrorInfo, LoadModelMsg, ScalerState, StepDoneMsg, UnitSpec
from rpruntime.wire.succession import ModelState


@dataclass(frozen=True)
class ModelAddedEvent:
    """A model has been loaded by all roles; version 0 is published by the optimizer."""

    model: int
    units: tuple[UnitSpec, ...]
    layer_units: tuple[tuple[int, ...], ...]
    buffers: tuple[tuple[int, Payload], ...]
    """(position, initial buffers) of the layers that have any."""
    grain: str
    asynchronous: bool
    master: tuple[Extent, ...]
    """Version 0 of each unit."""
    loss_scale: float = 1.0
    """Of the first iteration."""
    found: ModelState | None = None
    """What an older controller has left of it; None: it is new. `buffers` and `master` are those in there."""


@dataclass(frozen=True)
class ModelLoadingEvent:
    """Tell all roles to load a model; so is a worker that starts later."""

    load: LoadModelMsg


@dataclass(frozen=True)
class ModelFoundEvent:
    """The optimizer has a model of an older controller: tell the workers to load it; so is one that starts later."""

    load: LoadModelMsg


@dataclass(frozen=True)
class KeepOpenEvent:
    """This controller is about to detach: what the open iteration has summed so far is kept for the next one.

    Its calls have finished and no step is queued.
    """

    model: int


@dataclass(frozen=True)
class ModelUndoneEvent:
    """Loading failed: all roles forget the model."""

    model: int


@dataclass(frozen=True)
class ModelRemovedEvent:
    """The pipe was closed; nothing of the model is running."""

    model: int


@dataclass(frozen=True)
class CallEvent:
    """`forward_backward` (or `forward`, when `inference`): inputs and labels lie in the controller's arena."""

    call: int
    model: int
    plan: ExecutionPlan | None
    """None: a training call whose tasks are submitted one by one (`TasksEvent`)."""
    inputs: tuple[Payload, ...]
    labels: tuple[Payload | None, ...]
    coefficients: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]
    scale: float
    context: dict[str, Any]
    inference: bool = False
    wants_output: bool = False
    """Of an inference call: the outputs come back (else only the losses)."""


@dataclass(frozen=True)
class TasksEvent:
    """Tasks of a call without a plan, submitted together; they get the next slots' numbers, in order."""

    model: int
    call: int
    tasks: tuple[TaskOrder, ...]


@dataclass(frozen=True)
class StepEvent:
    """`step()`: seal the open iteration."""

    model: int
    groups: tuple[dict[str, Any], ...]
    max_grad_norm: float | None


@dataclass(frozen=True)
class DiscardEvent:
    """`zero_grad()`: the open iteration's calls have completed and their gradients are not wanted."""

    model: int


@dataclass(frozen=True)
class AbandonEvent:
    """The pipe is being closed and nobody wants what still runs: cancel it, without a failure to report.

    `sealed`: also iterations whose step has been asked for; the weights mean nothing then.
    """

    model: int
    sealed: bool


@dataclass(frozen=True)
class SetScalerEvent:
    """The gradient scaler goes on from this state; nothing runs and the open iteration has no call.

    `previous`: the scale that the next iteration uses where it reads older weights; None: the state's.
    """

    model: int
    state: ScalerState
    previous: float | None = None


@dataclass(frozen=True)
class OutputTakenEvent:
    """The script has copied the outputs of an inference call."""

    call: int


@dataclass(frozen=True)
class SaveEvent:
    """`save_checkpoint()`: keep what the open iteration starts from until `SaveOverEvent`, and copy the units."""

    model: int
    save: int
    room_bytes: int


@dataclass(frozen=True)
class SaveOverEvent:
    """A save has been written, or given up."""

    model: int
    save: int


@dataclass(frozen=True)
class RestoreEvent:
    """A checkpoint is being loaded: nothing is running or wanted, and a new iteration opens, with new weights.

    `step`: steps behind them in the training; None: as many as now. `call`: under which number the `buffers` are
    known. `previous`: the iteration reads a version of its own, and the next one the newest (staleness 1).
    """

    model: int
    call: int
    step: int | None
    seed: int | None
    buffers: tuple[tuple[int, Payload], ...]
    previous: bool


Event = (
    ModelLoadingEvent
    | ModelFoundEvent
    | KeepOpenEvent
    | ModelUndoneEvent
    | ModelAddedEvent
    | ModelRemovedEvent
    | CallEvent
    | TasksEvent
    | StepEvent
    | DiscardEvent
    | AbandonEvent
    | SetScalerEvent
    | OutputTakenEvent
    | SaveEvent
    | SaveOverEvent
    | RestoreEvent
)


@dataclass(frozen=True)
class FinishCall:
    """All slots of a call have committed. `losses` per micro-batch, `loss` combined by the call's coefficients."""

    call: int
    loss: float
    losses: tuple[float, ...]
    metrics: tuple[dict[str, float], ...]
    weights: tuple[float, ...]
    scale: float
    outputs: tuple[Payload, ...]


@dataclass(frozen=True)
class FinishTask:
    """A slot of a call without a plan has committed; spans as in `SlotCommittedMsg`."""

    model: int
    call: int
    slot: int
    role: str
    spans: tuple[tuple[str, int, int, int, float, float], ...]
    tries: int


@dataclass(frozen=True)
class FinishStep:
    """A step is done."""

    model: int
    msg: StepDoneMsg


@dataclass(frozen=True)
class NoteTimes:
    """A training slot took this long; rows as in `SlotCommittedMsg.spans`."""

    model: int
    spans: tuple[tuple[str, int, int, int, float, float], ...]
    peak_bytes: int


@dataclass(frozen=True)
class ReportFailure:
    """The user's code raised: these calls and steps will never finish. Cancelling goes on."""

    model: int
    call: int
    num_microbatches: int
    error: ErrorInfo
    calls: tuple[int, ...]
    steps: tuple[int, ...]
    slot: int = 0
    """The one that failed."""


@dataclass(frozen=True)
class FinishCancel:
    """Everything cancelled is gone; the model takes calls again, from iteration `iteration`."""

    model: int
    iteration: int


@dataclass(frozen=True)
class DropSave:
    """A save was asked for after a step that has been cancelled: there is nothing to be saved."""

    model: int
    save: int


@dataclass(frozen=True)
class NoteShortage:
    """A slot over these layers found its device's memory too small and had to run again."""

    model: int
    layers: tuple[int, int]


@dataclass(frozen=True)
class NoteRedone:
    """A worker died: so many of its slots and micro-batches are handed out again, to these roles."""

    role: str
    slots: int
    microbatches: int
    to: tuple[str, ...]


@dataclass(frozen=True)
class ReleaseOwner:
    """Nothing of a dead process's arena is read any more, and no replacement will adopt it."""

    owner: str


@dataclass(frozen=True)
class EndRun:
    """The run cannot go on; `reason` is for the user."""

    reason: str


Instruction = (
    Send | FreeOwn | FinishCall | FinishTask | FinishStep | NoteTimes | ReportFailure | FinishCancel | NoteShortage
    | NoteRedone | ReleaseOwner | EndRun | DropSave
)  # fmt: skip
