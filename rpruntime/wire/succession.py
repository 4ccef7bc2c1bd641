"""Messages about controllers that come and go on a session that stays (docs/client.md, docs/protocol.md)."""

from __future__ import annotations

from dataclasses import dataclass

from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.wire.codec import message, struct
from rpruntime.wire.messages import ErrorInfo, ScalerState

Buffers = tuple[tuple[int, Payload], ...]
"""(position, buffers of the layer there)"""


def head_place(model: int) -> tuple[int, int]:
    """Where a controller says that the buffers lie which one before it left in the open iteration."""
    return (-model, 1)


@message
@dataclass(frozen=True, slots=True)
class DetachMsg:
    """Controller to launcher: it gives up its place; what it was to wait for is over."""

    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class ControllerGoneMsg:
    """Launcher to optimizer: this controller takes no part any more; finish what it has sealed and say so."""

    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class SettledMsg:
    """Answer to `ControllerGoneMsg`: every step that was sealed is done."""

    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class ResetMsg:
    """Launcher to workers and optimizer: be as if nobody had ever used you, but for what outlives a controller.

    `incarnation`: the lowest number that the next controller can have; `roles` are the present processes.
    """

    incarnation: int
    roles: dict[str, int]
    retired: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class ResetDoneMsg:
    """Answer to `ResetMsg`: nothing of older controllers is read or written here any more."""

    role: str
    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class NoteModelMsg:
    """Controller to optimizer, when a model is loaded or its weights are replaced: what the next controller needs.

    `version`: of the weights that are there or follow; `step_offset` and `seed` as in the controller's machine.
    """

    model: int
    version: int
    step_offset: int
    seed: int | None
    buffers: tuple[tuple[int, Payload], ...]


@message
@dataclass(frozen=True, slots=True)
class KeepOpenMsg:
    """Controller to optimizer, before it detaches: these calls have finished, their sums wait for the next controller.

    `buffers` are those after them; `num_microbatches` counts the open iteration's, for the seeds.
    """

    model: int
    calls: tuple[int, ...]
    num_microbatches: int
    buffers: tuple[tuple[int, Payload], ...]


@message
@dataclass(frozen=True, slots=True)
class KeptMsg:
    """Answer to `KeepOpenMsg`: the sums and buffers lie in the optimizer's memory."""

    model: int


@message
@dataclass(frozen=True, slots=True)
class ReadModelsMsg:
    """New controller or observer to optimizer: which models are there? The answer goes to `role`.

    `whole`: with all that a controller needs to go on.
    """

    role: str
    whole: bool = False


@struct
@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model of the session. `state` names a packed `ModelState`, which the controller frees.

    `num_calls`: finished calls whose gradients wait for a step.
    """

    model: int
    name: str
    version: int
    step: int
    num_calls: int
    state: TensorHandle | None = None


@message
@dataclass(frozen=True, slots=True)
class ModelsMsg:
    """Answer to `ReadModelsMsg`; `error`: why they cannot be told."""

    models: tuple[ModelRow, ...]
    error: ErrorInfo | None = None


@struct
@dataclass(frozen=True, slots=True)
class ModelState:
    """All that a controller has to know of a model that another one has left.

    Buffers and their extents are the reader's to free, weights and package as ever the optimizer's.
    """

    model: int
    spec: TensorHandle
    """Of the packed `ModelSpec`, for `LoadModelMsg`."""
    version: int
    step_offset: int
    seed: int | None
    scaler: ScalerState | None
    scales: tuple[tuple[int, float], ...]
    """(version, loss scale of the iterations that read it)"""
    master: tuple[Extent, ...]
    previous: tuple[Extent, ...]
    """Version `version - 1`, where the open iteration reads it; else empty."""
    buffers: tuple[tuple[int, Payload], ...]
    """As the open iteration found them."""
    calls: tuple[int, ...]
    """Whose sums wait for a step."""
    num_microbatches: int
    head: tuple[tuple[int, Payload], ...]
    """Buffers after `calls`."""
