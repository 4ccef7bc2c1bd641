"""What outlives a controller (docs/client.md): the next one finds each model at its newest version.

NoteModelMsg, KeepOpenMsg           what a controller leaves besides the weights
ControllerGoneMsg --> SettledMsg    it has gone: steps that it had sealed are done
ResetMsg --> ResetDoneMsg           nothing else of it is left
ReadModelsMsg --> TellModels        what the next one finds
"""

from __future__ import annotations

from rpruntime.optimizer.events import KeepBuffers, KeepOnly, TellModels
from rpruntime.optimizer.model import Model
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import CONTROLLER, LAUNCHER, ROLE, Outbox
from rpruntime.optimizer.saves import Saves
from rpruntime.optimizer.steps import Steps
from rpruntime.store.handle import Extent, TensorHandle
from rpruntime.wire.succession import (
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
)

_NOWHERE = TensorHandle(Extent("", "", 0, 0), 0, (), (), "")


class Succession:
    """Of one controller to another, at most one at a time."""

    def __init__(self, models: Models, saves: Saves, steps: Steps, out: Outbox) -> None:
        self._models = models
        self._saves = saves
        self._steps = steps
        self._out = out
        self._gone: ControllerGoneMsg | None = None
        """A controller that has gone and whose steps are not all done."""
        self._reset: ResetMsg | None = None
        """A reset that waits for the running step."""

    # --- what a controller leaves

    def on_note(self, msg: NoteModelMsg) -> None:
        """A model is loaded, or is to get other weights."""
        model = self._models[msg.model]
        model.note, model.torn, model.open = msg, msg.version != model.version, None
        # model.buffers stay: those of the first call may have come before this message, by another link
        self._out.add(KeepBuffers(msg.model, msg.buffers))

    def on_keep_open(self, msg: KeepOpenMsg) -> None:
        """It is about to detach."""
        model = self._models[msg.model]
        if not model.failed:
            model.to_keep = msg
            self.keep_open(model)

    def keep_open(self, model: Model) -> None:
        """What a controller leaves is complete when all its gradients lie in this process's own memory."""
        msg = model.to_keep
        if msg is None or not model.sums.have_come(msg.calls):
            return
        model.to_keep = None
        if msg.num_microbatches:  # else the iteration is as the step before it left it
            model.open = msg
            self._out.add(KeepBuffers(msg.model, msg.buffers, head=True))
        self._out.send(CONTROLLER, KeptMsg(msg.model))

    # --- when it has gone

    def on_gone(self, msg: ControllerGoneMsg) -> None:
        """The mailbox has begun to drop what that controller sends."""
        self._gone = msg
        for model in self._models.all():
            model.reads.clear()
            self._saves.end_all(model)
            # nothing of it is to be kept: a `KeepOpenMsg` comes after the ends of all slots
            for slab in model.sums.stop_holding():
                model.sums.take(slab, whole=not model.failed)
            self._steps.start(model)

    def on_reset(self, msg: ResetMsg) -> None:
        """The workers have been reset."""
        self._reset, self._gone = msg, None
        self._out.retire(msg.retired)

    def go_on(self) -> None:
        """Answer the launcher, if the last event was what the answer waited for."""
        self._tell_settled()
        self._try_reset()

    def _tell_settled(self) -> None:
        if self._gone is None or any(model.running or model.steps for model in self._models.all()):
            return
        gone, self._gone = self._gone, None
        self._out.send(LAUNCHER, SettledMsg(gone.incarnation))

    def _try_reset(self) -> None:
        if self._reset is None:
            return
        for model in self._models.all():
            self._steps.end_without_buffers(model)
        if any(model.running is not None for model in self._models.all()):
            return
        msg, self._reset = self._reset, None
        self._models.leave_behind()
        models = {model.number: model for model in self._models.all()}
        versions = {number: (*model.master.values(), *model.previous_read()) for number, model in models.items()}
        iterations = {number: model.version for number, model in models.items() if model.open is not None}
        self._out.add(KeepOnly(versions, iterations))
        self._out.send(LAUNCHER, ResetDoneMsg(ROLE, msg.incarnation))

    # --- what the next one finds

    def on_read_models(self, msg: ReadModelsMsg) -> None:
        """A controller attaches, or somebody only looks."""
        rows = []
        for model in self._models.all():
            if model.note is None or model.failed:
                continue
            step = model.version + model.note.step_offset
            row = ModelRow(model.number, model.spec.name, model.version, step, len(model.sums.calls))
            rows.append((row, _state(model, model.note)))
        self._out.add(TellModels(msg, tuple(rows)))


def _state(model: Model, note: NoteModelMsg) -> ModelState:
    """The shell adds what only it knows: the package and the buffers."""
    return ModelState(
        model=model.number,
        spec=_NOWHERE,
        version=model.version,
        step_offset=note.step_offset,
        seed=note.seed,
        scaler=model.scales.state,
        scales=model.scales.told(model.version),
        master=tuple(model.master[unit.index] for unit in model.spec.units) if model.master else (),
        previous=model.previous_read(),
        buffers=(),
        calls=() if model.open is None else model.open.calls,
        num_microbatches=0 if model.open is None else model.open.num_microbatches,
        head=(),
    )
