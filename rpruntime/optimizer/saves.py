"""Saves: each has every trainable unit copied as it is between two steps.

A later step waits for a unit's copy, never for the file.
"""

from __future__ import annotations

from collections import deque

from rpruntime.optimizer.events import CopyFailedEvent, CopyUnit, FreeCopies, UnitCopiedEvent
from rpruntime.optimizer.model import Model, Snapshot
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import CONTROLLER, Outbox
from rpruntime.wire.messages import (
    SnapshotBegunMsg,
    SnapshotEndMsg,
    SnapshotFailedMsg,
    SnapshotMsg,
    SnapshotWrittenMsg,
)


class Saves:
    """The snapshots of all models: in their order, one unit at a time, while there is room."""

    def __init__(self, models: Models, out: Outbox) -> None:
        self._models = models
        self._out = out

    # --- what the controller asks

    def on_snapshot(self, msg: SnapshotMsg) -> None:
        """A save is asked for."""
        model = self._models[msg.model]
        if model.failed:
            self._out.send(CONTROLLER, SnapshotFailedMsg(msg.model, msg.save, model.failed))
            return
        model.snapshots.append(Snapshot(msg, deque(model.units_in_order())))
        self.copy_next(model)

    def on_written(self, msg: SnapshotWrittenMsg) -> None:
        """A copy lies on disk: there is room for another one."""
        model = self._models.get(msg.model)
        if model is None:
            return
        for snapshot in model.snapshots:
            if snapshot.msg.save == msg.save and msg.unit in snapshot.copied:
                del snapshot.copied[msg.unit]
                self._out.add(FreeCopies(msg.model, msg.save, msg.unit))
                self.copy_next(model)

    def on_end(self, msg: SnapshotEndMsg) -> None:
        """A save is written or given up."""
        if msg.model in self._models:
            self.end(self._models[msg.model], msg.save)

    # --- what the shell reports

    def on_copied(self, event: UnitCopiedEvent) -> None:
        """A unit may be stepped, as far as this save is concerned."""
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
            self._out.add(FreeCopies(event.model, event.save, event.unit))
        self._go_on(model)

    def on_copy_failed(self, event: CopyFailedEvent) -> None:
        """The save is over, training goes on."""
        model = self._models.get(event.model)
        if model is None:
            return
        model.copying = False
        self._fail(model, event.save, event.reason)

    # --- for steps and cancels

    def step_next(self, model: Model) -> None:
        """If no unit is being stepped: the next one of the running step that no save still has to copy as it is."""
        step = model.running
        if step is None or step.is_stepping:
            return
        earlier = [snapshot for snapshot in model.snapshots if snapshot.msg.step <= step.msg.step]
        to_copy = {unit for snapshot in earlier for unit in snapshot.to_copy}
        instruction = next((found for found in step.queue if found.unit not in to_copy), None)
        if instruction is not None:
            step.queue.remove(instruction)
            step.is_stepping = True
            self._out.add(instruction)

    def copy_next(self, model: Model) -> None:
        """Start what can be started, when room or a step's end may allow it."""
        earlier = [step.step for step in model.steps]
        if model.running is not None:
            earlier.append(model.running.msg.step)
        for snapshot in model.snapshots:
            if any(step < snapshot.msg.step for step in earlier):
                return
            number, save = model.number, snapshot.msg.save
            if not snapshot.begun:
                snapshot.begun = True
                scaler = model.scales.saved(asynchronous=model.spec.asynchronous)
                self._out.send(CONTROLLER, SnapshotBegunMsg(number, save, scaler))
            taken = sum(sum(other.copied.values()) for other in model.snapshots)
            if snapshot.to_copy and not model.copying and (taken == 0 or taken < snapshot.msg.room_bytes):
                model.copying = True
                self._out.add(CopyUnit(number, save, snapshot.to_copy[0]))

    def drop_after(self, model: Model, step: int) -> None:
        """This step and later ones are never done; the controller ends what was to be saved after them."""
        model.snapshots = [snapshot for snapshot in model.snapshots if snapshot.msg.step <= step]

    def fail_all(self, model: Model) -> None:
        """The model's weights are not what they should be."""
        snapshots, model.snapshots = model.snapshots, []
        for snapshot in snapshots:
            self._fail(model, snapshot.msg.save, model.failed)

    def end_all(self, model: Model) -> None:
        """Nobody writes them any more."""
        snapshots, model.snapshots = model.snapshots, []
        for snapshot in snapshots:
            self.end(model, snapshot.msg.save)

    def end(self, model: Model, save: int) -> None:
        """Nothing of a save is wanted any more."""
        model.snapshots = [snapshot for snapshot in model.snapshots if snapshot.msg.save != save]
        self._out.add(FreeCopies(model.number, save, None))
        self._go_on(model)

    def _fail(self, model: Model, save: int, reason: str) -> None:
        self._out.send(CONTROLLER, SnapshotFailedMsg(model.number, save, reason))
        self.end(model, save)

    def _go_on(self, model: Model) -> None:
        """Step what waited for a copy and need not wait any more; copy the next unit."""
        self.step_next(model)
        self.copy_next(model)
