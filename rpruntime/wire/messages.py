"""Every message of the protocol, one frozen class each; `docs/protocol.md` describes them and a test compares the two.

Roles are strings: "launcher", "controller", "optimizer", "worker-0"... A *key* names a piece of data:

    ("act", call, microbatch, position)    input of the layer at `position` (position 0: the call's own arguments)
    ("agrad", call, microbatch, position)  gradients of that input's tensors
    ("label", call, microbatch)            labels
    ("buffer", call, microbatch, position) buffers of the layer after that micro-batch's forward
    ("out", call, microbatch)              output of the last layer, for the controller
    ("slab", call, slot, position, unit)   summed gradients of one storage unit from one slot
    ("weights", model, unit, version)      master copy of one storage unit
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.wire.codec import message, struct

PROTOCOL_VERSION = 4

Key = tuple[Any, ...]


# --- session life ----------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class HelloMsg:
    """Child to launcher, its first words: who it is. An old protocol version is refused."""

    role: str
    incarnation: int
    pid: int
    protocol: int = PROTOCOL_VERSION


@message
@dataclass(frozen=True, slots=True)
class ReadyMsg:
    """Child to launcher: its device works, it takes tasks. `info`: device name, memory in bytes, threads."""

    role: str
    incarnation: int
    info: dict[str, Any]


@message
@dataclass(frozen=True, slots=True)
class StartFailedMsg:
    """Child to launcher: it cannot start, in words for the user; it exits right after."""

    role: str
    incarnation: int
    reason: str


@message
@dataclass(frozen=True, slots=True)
class AttachMsg:
    """Controller to launcher: asks for the controller's place. `argv`: its command, for others who want it."""

    pid: int
    protocol: int = PROTOCOL_VERSION
    incarnation: int = 1
    argv: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class AttachedMsg:
    """Launcher to controller: the place is yours. `ready` holds the `ReadyMsg.info` of the roles ready so far."""

    session: str
    devices: tuple[str, ...]
    ready: dict[str, dict[str, Any]]
    config: dict[str, Any]
    incarnations: dict[str, int] = field(default_factory=dict)
    """Of the workers, as all processes have been told by a `ResetMsg`; others are their first."""
    retired: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class RefusedMsg:
    """Launcher to whoever asked for something it does not get, with the reason in words."""

    reason: str


@message
@dataclass(frozen=True, slots=True)
class RoleReadyMsg:
    """Launcher to controller: a role has become ready."""

    role: str
    incarnation: int
    info: dict[str, Any]


@message
@dataclass(frozen=True, slots=True)
class RoleDiedMsg:
    """Launcher to controller: the kernel reported the end of a role's process; `reason` says why, in words.

    `pid` is 0 if there was no process yet. `restarts`: a process of the next incarnation is being started.
    `was_ready`: it had taken work. `slots` were running, as its status page has it; `phase`, `layer`, `microbatch` are
    where the user's code was (-1: nowhere).
    """

    role: str
    incarnation: int
    pid: int
    reason: str
    restarts: bool = False
    slots: tuple[int, ...] = ()
    phase: str = ""
    layer: int = -1
    microbatch: int = -1
    was_ready: bool = True

    @property
    def who(self) -> str:
        """For texts."""
        return f"{self.role} (pid {self.pid})" if self.pid else self.role


@message
@dataclass(frozen=True, slots=True)
class FenceMsg:
    """Controller to workers and optimizer: `role` is its process number `incarnation` now, or nobody (`retired`).

    The receiver's mailbox drops what an older one has sent and sends to the new one.
    """

    role: str
    incarnation: int
    retired: bool = False


@message
@dataclass(frozen=True, slots=True)
class FencedMsg:
    """Answer to `FenceMsg`: nothing of an older process of `role` will be taken in by `by`."""

    role: str
    incarnation: int
    by: str


@message
@dataclass(frozen=True, slots=True)
class ForgetMsg:
    """Replacement or controller to everybody: these segments will not be read again; drop the mappings."""

    segments: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True)
class AdoptMsg:
    """Controller to a replacement: the segments of its predecessor `owner` are free room of yours."""

    owner: str


@message
@dataclass(frozen=True, slots=True)
class ShutdownMsg:
    """Launcher to child: end now; to the controller: the session ends. Controller to launcher: end the session (only of
    one that it started)."""

    reason: str = ""


@message
@dataclass(frozen=True, slots=True)
class ProtocolErrorMsg:
    """To the sender of a message that could not be understood: what was wrong with it."""

    role: str
    error: str


# --- models ----------------------------------------------------------------------------------------------------


@struct
@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter in a unit's slab: byte offset, shape and dtype of the master copy."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    grad_dtype: str
    group: int
    """Index of its optimizer group; -1: none."""


@struct
@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A storage unit: parameters in one slab, versioned and stepped together.

    `positions`: the layers that use it, ascending; more than one for a shared parameter.
    """

    index: int
    trainable: bool
    positions: tuple[int, ...]
    nbytes: int
    params: tuple[ParamSpec, ...]


@struct
@dataclass(frozen=True, slots=True)
class CodeObject:
    """A cloudpickle whose tensors are taken out (a layer, a loss function, an optimizer).

    `tensors[i]` says what tensor i is: ("param", unit, index in the unit), ("buffer", name) or ("constant", handle).
    """

    data: TensorHandle
    tensors: tuple[tuple[Any, ...], ...]


@struct
@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A position: its name in the model, its module, the units that its parameters live in, whether it has buffers.

    `shared`: the same module stands at another position too, so its buffers must not change.
    """

    name: str
    class_name: str
    module: CodeObject
    units: tuple[int, ...]
    buffers: bool
    shared: bool = False


@message
@dataclass(frozen=True, slots=True)
class LoadModelMsg:
    """Controller to workers and optimizer: a model's layout is under `spec` (a pickled `ModelSpec`: it can be large).

    Workers build modules, the optimizer its slabs.
    """

    model: int
    spec: TensorHandle


@struct
@dataclass(frozen=True, slots=True)
class ScalerState:
    """The loss scale of fp16 training and how it moves, as in `torch.amp.GradScaler`."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    """Steps in a row that were not skipped, since the scale moved last."""


@struct
@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that workers and optimizer need to know of a model."""

    model: int
    name: str
    layers: tuple[LayerSpec, ...]
    units: tuple[UnitSpec, ...]
    loss_fn: CodeObject | None
    """None: the last layer's output is the loss."""
    optimizer: CodeObject | None
    """(class, attributes) of the user's optimizer; None: gradients are summed and never stepped."""
    seed: int
    recompute: str
    asynchronous: bool
    cast: bool
    """Whether parameters were cast: then a floating buffer that changes is an error, as it was not."""
    worker_bytes: int
    """What each worker reserves for gradients while the model loads, so that its arena need not grow in a run."""
    python_path: tuple[str, ...]
    """The script's `sys.path`, for classes that are pickled by reference."""
    scaler: ScalerState | None = None
    """None: losses are not scaled."""
    lent: tuple[Extent | None, ...] = ()
    """Where each unit's initial weights lie already in the controller's memory; None: nowhere (empty: no unit's)."""


@message
@dataclass(frozen=True, slots=True)
class ModelAllocatedMsg:
    """Optimizer to controller: where the initial weights go. `optim[i]` is None for a frozen unit."""

    model: int
    master: tuple[Extent, ...]
    optim: tuple[Extent | None, ...]


@message
@dataclass(frozen=True, slots=True)
class ModelFilledMsg:
    """Controller to optimizer: the weights are written; publish version 0."""

    model: int


@message
@dataclass(frozen=True, slots=True)
class ModelReadyMsg:
    """Worker or optimizer to controller: it has built its part of the model."""

    model: int
    role: str


@message
@dataclass(frozen=True, slots=True)
class UnloadModelMsg:
    """Controller to workers and optimizer: forget the model; the optimizer frees its slabs."""

    model: int


# --- work ------------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class CallMsg:
    """Controller to workers, before the tasks of a call: what all its slots share.

    `iteration`: the number of the step that its gradients are for, from the start of the training (for the seeds).
    `buffers_kept`: buffers of calls before this one are never read again (what a rewound iteration starts from is not).
    `coefficients[m]` is (numerator, denominator) of the micro-batch's loss; `first_microbatch` counts the
    iteration's micro-batches before this call (for the seeds); `buffers_from` is the (call, micro-batch) whose
    buffers the first micro-batch reads; `context` holds the script's autocast, dtype and determinism settings.
    """

    call: int
    model: int
    iteration: int
    num_microbatches: int
    first_microbatch: int
    coefficients: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]
    scale: float
    training: bool
    has_labels: bool
    wants_output: bool
    buffers_from: tuple[int, int]
    buffers_kept: int
    context: dict[str, Any]
    loss_scale: float | None = None
    """Multiplies each loss before backward; None: the scale that came with the version that its slots read."""
    seed: int | None = None
    """Of a resumed run; None: the model's."""


@struct
@dataclass(frozen=True, slots=True)
class SlotTask:
    """One slot: a stage over a set of micro-batches on one device.

    `kind`: "forward", "fused", "backward" or "infer". `layers` is (start, stop). `publish` lists positions whose
    inputs this slot publishes, each with the roles that read them; `grad_to` are the readers of the input gradient;
    `buffer_to` the readers of the buffers that a forward leaves.
    """

    slot: int
    call: int
    model: int
    kind: str
    layers: tuple[int, int]
    microbatches: tuple[int, ...]
    version: int
    publish: tuple[tuple[int, tuple[str, ...]], ...] = ()
    grad_to: tuple[str, ...] = ()
    buffer_to: tuple[str, ...] = ()
    attempt: int = 0
    """How many processes died with this slot unfinished; above 0 the device is waited for at every layer, so that a
    repeated fault is blamed on the right one."""


@message
@dataclass(frozen=True, slots=True)
class TaskMsg:
    """Controller to worker: append this slot to the queue."""

    task: SlotTask


@message
@dataclass(frozen=True, slots=True)
class DataReadyMsg:
    """Peer to peer and to the controller: the data of `key` can be read under these handles.

    `slot` published it; 0: the controller, with a call's inputs and labels.
    """

    model: int
    key: Key
    payload: Payload
    slot: int = 0


@message
@dataclass(frozen=True, slots=True)
class WeightsReadyMsg:
    """Optimizer to workers and controller: version `version` of these units lies in these extents.

    `loss_scale`: the scale after `version` steps, for the iterations that read this version.
    """

    model: int
    version: int
    units: tuple[tuple[int, Extent], ...]
    loss_scale: float = 1.0


@struct
@dataclass(frozen=True, slots=True)
class SlabPart:
    """The gradients that one slot summed for one unit at one position; `present[i]`: parameter i got one."""

    unit: int
    extent: Extent
    present: tuple[bool, ...]


@message
@dataclass(frozen=True, slots=True)
class SlabReadyMsg:
    """Worker to optimizer and controller: the gradients of a position are in host memory.

    No part: nothing there got a gradient.
    """

    model: int
    call: int
    slot: int
    position: int
    parts: tuple[SlabPart, ...]


@message
@dataclass(frozen=True, slots=True)
class LossReadyMsg:
    """Worker to controller: loss and metrics of one micro-batch, unweighted."""

    call: int
    microbatch: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class SlotCommittedMsg:
    """Worker to controller: all that the slot wrote is published and was told before; what it read may go.

    `tries`: how often it ran, more than once where the device was short of memory. `spans` are rows (phase, first
    layer, layer after the last, micro-batch, start, end) of what the device computed, in milliseconds of the machine's
    monotonic clock: "forward" and "recompute" by layer, "loss", "backward" by segment. `peak_bytes`: the device's
    memory at its highest during
    the slot; 0 on a CPU.
    """

    slot: int
    role: str
    spans: tuple[tuple[str, int, int, int, float, float], ...] = ()
    peak_bytes: int = 0
    tries: int = 1


@struct
@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An exception on its way to the script.

    `pickled` is the exception (b"" if it cannot be pickled), `type_name` and `text` describe it in any case.
    `frames` are (file, line, function, source) of the user's code, outermost first; `traceback` is the whole text.
    `microbatch` and `layer` are -1 where they say nothing.
    """

    pickled: bytes
    type_name: str
    text: str
    traceback: str
    frames: tuple[tuple[str, int, str, str], ...]
    phase: str = ""
    layer: int = -1
    layer_name: str = ""
    microbatch: int = -1
    device: str = ""
    log_file: str = ""


@message
@dataclass(frozen=True, slots=True)
class SlotFailedMsg:
    """Worker to controller: the user's code raised in this slot."""

    slot: int
    call: int
    role: str
    error: ErrorInfo


@message
@dataclass(frozen=True, slots=True)
class RoleFailedMsg:
    """Worker or optimizer to controller: an exception outside any slot (loading, stepping). `model` -1: none."""

    role: str
    model: int
    error: ErrorInfo


@message
@dataclass(frozen=True, slots=True)
class ExpectSlabsMsg:
    """Controller to optimizer: the backward slots of a call as (slot, start, stop) in the order of addition.

    `version`: of the weights that they read, and so of the scale that their gradients carry.
    """

    model: int
    iteration: int
    call: int
    slots: tuple[tuple[int, int, int], ...]
    version: int = 0


@message
@dataclass(frozen=True, slots=True)
class SlotOverMsg:
    """Controller to optimizer: a slot with gradients has committed. The weights that it read were freed before, if
    nobody else reads them."""

    model: int
    call: int
    slot: int


@message
@dataclass(frozen=True, slots=True)
class StepMsg:
    """Controller to optimizer: seals the iteration and queues step `step` with these group hyper-parameters."""

    model: int
    step: int
    calls: tuple[int, ...]
    groups: tuple[dict[str, Any], ...]
    max_grad_norm: float | None
    buffers_from: tuple[int, int] = (0, 0)
    """(call, micro-batch) whose buffers the next iteration starts from; the step is done when they are kept."""


@message
@dataclass(frozen=True, slots=True)
class SetScalerMsg:
    """Controller to optimizer, between two steps: the scaler goes on from here.

    `scales` are (version, scale) of the versions that the open iteration and later ones can still read.
    """

    model: int
    state: ScalerState
    scales: tuple[tuple[int, float], ...]


@message
@dataclass(frozen=True, slots=True)
class SlabDoneMsg:
    """Optimizer to controller: it has no further use for these gradient slabs (keys without their first element)."""

    slabs: tuple[tuple[int, int, int, int], ...]


@message
@dataclass(frozen=True, slots=True)
class StepDoneMsg:
    """Optimizer to controller: version `step + 1` of every unit is published (or about to be, in order)."""

    model: int
    step: int
    grad_norm: float | None
    skipped: bool
    seconds: float
    loss_scale: float = 1.0
    """That the step's losses were multiplied by."""
    scaler: ScalerState | None = None
    """After the step."""


@message
@dataclass(frozen=True, slots=True)
class FreeMsg:
    """Controller to the owner of extents: nobody needs them any more."""

    extents: tuple[Extent, ...]


@message
@dataclass(frozen=True, slots=True)
class CancelMsg:
    """Controller to workers and optimizer: drop calls `first_call` .. `last_call` and their unstepped sums."""

    model: int
    first_call: int
    last_call: int


@message
@dataclass(frozen=True, slots=True)
class CancelledMsg:
    """Answer to `CancelMsg`: nothing of these calls runs here; `extents` were written for slots without a commit."""

    model: int
    first_call: int
    role: str
    extents: tuple[Extent, ...]


@message
@dataclass(frozen=True, slots=True)
class DiscardMsg:
    """Controller to optimizer: the gradients of these calls are not wanted (`zero_grad`)."""

    model: int
    calls: tuple[int, ...]


@message
@dataclass(frozen=True, slots=True)
class ReadStateMsg:
    """Controller to optimizer: asks for "gradients" (of these calls, when summed) or the optimizer's "state"."""

    model: int
    request: int
    what: str
    calls: tuple[int, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class StateMsg:
    """Answer to `ReadStateMsg`, in parts: rows (unit, parameter index, name, tensor), which the controller frees.

    Also a unit of a snapshot (`what` is "snapshot", `request` the save), whose rows the optimizer frees itself after
    `SnapshotWrittenMsg`. `payload`: a dict of what is no tensor, by (unit, index, name). `last`: no part follows.
    """

    model: int
    request: int
    what: str
    rows: tuple[tuple[int, int, str, TensorHandle], ...]
    payload: Payload | None = None
    unit: int = -1
    last: bool = True


# --- checkpoints -----------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class SnapshotMsg:
    """Controller to optimizer: copy every trainable unit as it is after the steps before `step`, before any later one.

    While unwritten copies take `room_bytes`, no further unit is copied, and a later step waits for it.
    """

    model: int
    save: int
    step: int
    room_bytes: int


@message
@dataclass(frozen=True, slots=True)
class SnapshotBegunMsg:
    """Optimizer to controller: the steps before the snapshot are done; its units follow as `StateMsg`."""

    model: int
    save: int
    scaler: dict[str, Any] | None = None


@message
@dataclass(frozen=True, slots=True)
class SnapshotWrittenMsg:
    """Controller to optimizer: a unit's copy is written and can go."""

    model: int
    save: int
    unit: int


@message
@dataclass(frozen=True, slots=True)
class SnapshotEndMsg:
    """Controller to optimizer: the save is over, complete or not; nothing of its snapshot is wanted any more."""

    model: int
    save: int


@message
@dataclass(frozen=True, slots=True)
class SnapshotFailedMsg:
    """Optimizer to controller: a unit could not be copied, in words; training goes on."""

    model: int
    save: int
    reason: str


@message
@dataclass(frozen=True, slots=True)
class RestoreMsg:
    """Controller to optimizer, which has nothing to do: every unit follows, and becomes version `version`.

    `previous`: version `version - 1`, which the next asynchronous iteration reads, comes along.
    """

    model: int
    request: int
    version: int
    previous: bool
    scaler: dict[str, Any] | None = None


@message
@dataclass(frozen=True, slots=True)
class RestoreUnitMsg:
    """Controller to optimizer: a unit's values, in parts, as (parameter index, name, tensor); no row: it stays.

    Name "" is the weight in the optimizer's dtype (of a frozen unit: in the model's), "-1" the weight one version
    before in the model's dtype, any other one a state. `whole`: the state is replaced, else only weights.
    """

    model: int
    request: int
    unit: int
    rows: tuple[tuple[int, str, TensorHandle], ...]
    payload: Payload | None = None
    whole: bool = True
    last: bool = True


@message
@dataclass(frozen=True, slots=True)
class RestoredMsg:
    """Answer to `RestoreUnitMsg`: its tensors are read; the unit's versions are published."""

    model: int
    request: int
    unit: int


# --- traces ----------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class TraceMsg:
    """Controller to workers and optimizer: send `TraceSpansMsg` from now on, or no more."""

    on: bool


@message
@dataclass(frozen=True, slots=True)
class TraceSpansMsg:
    """Worker or optimizer to controller while it traces: what it did besides the spans of `SlotCommittedMsg`.

    Rows are (stream, name, number, first layer, layer after the last, micro-batch, start, end, bytes) in milliseconds
    of the machine's monotonic clock. `number` is the slot, in the optimizer the step; -1 where a field says nothing. A
    worker's rows about a slot come before its `SlotCommittedMsg`.
    """

    role: str
    rows: tuple[tuple[str, str, int, int, int, int, float, float, int], ...]
