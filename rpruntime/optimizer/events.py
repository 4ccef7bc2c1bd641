"""What goes into the optimizer's machine besides the peers' messages, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpruntime.store.handle import Extent
from rpruntime.wire.instructions import Forget as Forget
from rpruntime.wire.instructions import FreeOwn as FreeOwn
from rpruntime.wire.instructions import Send as Send
from rpruntime.wire.messages import ModelSpec, ReadStateMsg, RestoreUnitMsg, SlabPart, StepDoneMsg
from rpruntime.wire.succession import Buffers, ModelRow, ModelState, ReadModelsMsg


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
    reason: str


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


WORK = (AddSlab, MeasureNorm, StepUnit)
"""What uses or changes a model's gradients and weights: it is not done after a `WorkFailedEvent`."""


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
