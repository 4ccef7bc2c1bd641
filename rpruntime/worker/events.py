"""What goes into the worker's machine besides the peers' messages, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.instructions import Forget as Forget
from rpruntime.wire.instructions import FreeOwn as FreeOwn
from rpruntime.wire.instructions import Send as Send
from rpruntime.wire.messages import CallMsg, ErrorInfo, Key, ModelSpec, SlabPart, SlotTask

# --- from the shell


@dataclass(frozen=True)
class LaunchedEvent:
    """The shell has carried out the last `RunMicrobatch` or `FinishSlot`, as far as the host is concerned."""


@dataclass(frozen=True)
class PublishedEvent:
    """`key` lies in host memory. `own` are the extents that this worker allocated for it."""

    slot: int
    key: Key
    payload: Payload
    own: tuple[Extent, ...]


@dataclass(frozen=True)
class LossEvent:
    """The loss of a micro-batch has reached the host."""

    slot: int
    microbatch: int
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class SlabEvent:
    """The summed gradients of a position have reached the host."""

    slot: int
    position: int
    parts: tuple[SlabPart, ...]


@dataclass(frozen=True)
class SlotDoneEvent:
    """Everything that the slot writes has been published."""

    slot: int
    spans: tuple[tuple[str, int, int, int, float, float], ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True)
class SlotFailedEvent:
    """The user's code raised."""

    slot: int
    error: ErrorInfo


@dataclass(frozen=True)
class OutOfMemoryEvent:
    """The device had no room for what the slot needed; `error` is for the script if it is of no use to try again."""

    slot: int
    error: ErrorInfo


@dataclass(frozen=True)
class SlotDroppedEvent:
    """Nothing of a dropped slot is in flight; `own` are the extents that it had allocated."""

    slot: int
    own: tuple[Extent, ...]


@dataclass(frozen=True)
class ModelBuiltEvent:
    """The shell has built a model's modules."""

    model: int


# --- to the shell


@dataclass(frozen=True)
class BuildModel:
    """Build the modules of a model."""

    msg: ModelSpec


@dataclass(frozen=True)
class ForgetModel:
    """Drop the modules of a model."""

    model: int


@dataclass(frozen=True)
class StageWeights:
    """Start uploading the weights of a slot, unit -> extent; `by_layer`: it runs in as little memory as it can."""

    task: SlotTask
    units: dict[int, Extent]
    by_layer: bool = False


@dataclass(frozen=True)
class RunMicrobatch:
    """Run one micro-batch of a slot. `inputs` holds the payload of each key that it reads."""

    task: SlotTask
    call: CallMsg
    microbatch: int
    inputs: dict[Key, Payload]
    loss_scale: float = 1.0
    """Of a fused slot: multiplies the loss before backward."""


@dataclass(frozen=True)
class Prefetch:
    """Start bringing inputs of the micro-batch to the device that runs after the one being launched."""

    task: SlotTask
    microbatch: int
    inputs: dict[Key, Payload]


@dataclass(frozen=True)
class FinishSlot:
    """All micro-batches are launched: hand over the gradients, commit when everything is published."""

    task: SlotTask


@dataclass(frozen=True)
class DropSlot:
    """Forget a slot; answer with `SlotDroppedEvent` when none of its copies is in flight."""

    task: SlotTask


@dataclass(frozen=True)
class FreeCaches:
    """Give the device memory back that nothing uses."""


@dataclass(frozen=True)
class Adopt:
    """Take the segments of a dead predecessor into this worker's arena, all of them free."""

    owner: str


Instruction = (
    Send | BuildModel | ForgetModel | StageWeights | Prefetch | RunMicrobatch | FinishSlot | DropSlot | FreeOwn
    | FreeCaches | Adopt | Forget
)  # fmt: skip
