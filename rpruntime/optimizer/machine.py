"""The optimizer's brain: in which order gradients are added, when a step may run, what is published.

No sockets, clock, torch or threads.

    ExpectSlabsMsg, SlabReadyMsg
    and SlotOverMsg ---------------> AddSlab --> SlabDoneMsg: the worker has its room back
    StepMsg, when all are in ------> MeasureNorm, StepUnit --> WeightsReadyMsg, at the end StepDoneMsg
    SnapshotMsg -------------------> CopyUnit, between two steps of each unit

What is under way of a model lies in its `Model`. The parts beside it are told, in their constructors, of parts that
stand before them here:

    Outbox                              what goes out
    Models (Model)                      the models, and what is under way of each
        Sums, Scales, StartBuffers      a model's gradients, its loss scale, the buffers that its iterations start with
    Saves, Restores                     checkpoints
    Cancels, Steps                      what ends calls: an iteration that is given up, or stepped
    Succession                          from one controller to the next
    Gradients                           what comes from the workers, and sets off what waited for it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpruntime.optimizer.cancels import Cancels
from rpruntime.optimizer.events import (
    CopyFailedEvent,
    Forget,
    FreeOwn,
    Instruction,
    ModelFilledEvent,
    NormEvent,
    UnitCopiedEvent,
    UnitRestoredEvent,
    UnitSteppedEvent,
    WorkFailedEvent,
)
from rpruntime.optimizer.gradients import Gradients
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import CONTROLLER, ROLE, Outbox
from rpruntime.optimizer.restores import Restores
from rpruntime.optimizer.saves import Saves
from rpruntime.optimizer.steps import Steps
from rpruntime.optimizer.succession import Succession
from rpruntime.wire.messages import (
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
    RestoreMsg,
    RestoreUnitMsg,
    SetScalerMsg,
    SlabReadyMsg,
    SlotOverMsg,
    SnapshotEndMsg,
    SnapshotMsg,
    SnapshotWrittenMsg,
    StepMsg,
    UnloadModelMsg,
)
from rpruntime.wire.succession import ControllerGoneMsg, KeepOpenMsg, NoteModelMsg, ReadModelsMsg, ResetMsg


class OptimizerMachine:
    """One for all models of a session. `workers`: roles that want to know of new weights."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self._out = out = Outbox(workers)
        self._models = models = Models(out)
        saves, restores = Saves(models, out), Restores(models, out)
        cancels = Cancels(models, saves, out)
        steps = Steps(models, saves, cancels, out)
        self._succession = succession = Succession(models, saves, steps, out)
        gradients = Gradients(models, steps, succession, out)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelSpec: models.on_load,
            ModelFilledMsg: models.on_written,
            ModelFilledEvent: models.on_filled,
            UnloadModelMsg: models.on_unload,
            ExpectSlabsMsg: gradients.on_expect,
            SlabReadyMsg: gradients.on_slab,
            SlotOverMsg: gradients.on_slot_over,
            DiscardMsg: gradients.on_discard,
            ReadStateMsg: gradients.on_read,
            StepMsg: steps.on_step,
            NormEvent: steps.on_norm,
            UnitSteppedEvent: steps.on_unit_stepped,
            DataReadyMsg: steps.on_buffers,
            SetScalerMsg: steps.on_set_scaler,
            CancelMsg: steps.on_cancel,
            WorkFailedEvent: steps.on_work_failed,
            SnapshotMsg: saves.on_snapshot,
            UnitCopiedEvent: saves.on_copied,
            CopyFailedEvent: saves.on_copy_failed,
            SnapshotWrittenMsg: saves.on_written,
            SnapshotEndMsg: saves.on_end,
            RestoreMsg: restores.on_restore,
            RestoreUnitMsg: restores.on_unit,
            UnitRestoredEvent: restores.on_restored,
            NoteModelMsg: succession.on_note,
            KeepOpenMsg: succession.on_keep_open,
            ControllerGoneMsg: succession.on_gone,
            ResetMsg: succession.on_reset,
            ReadModelsMsg: succession.on_read_models,
            FenceMsg: self._on_fence,
            FreeMsg: lambda msg: out.add(FreeOwn(msg.extents)),
            ForgetMsg: lambda msg: out.add(Forget(msg.segments)),
        }

    def handle(self, *events: Any) -> list[Instruction]:
        """Take messages and events in, in order; returns what is to be done, in order."""
        for event in events:
            self._handlers[type(event)](event)
            self._succession.go_on()
        return self._out.take()

    def understands(self, message: Any) -> bool:
        """Whether a peer's message is for this machine."""
        return type(message) in self._handlers

    def _on_fence(self, msg: FenceMsg) -> None:
        """The mailbox has begun to drop what an older process of the role sends."""
        if msg.retired:
            self._out.retire([msg.role])
        self._out.send(CONTROLLER, FencedMsg(msg.role, msg.incarnation, ROLE))
