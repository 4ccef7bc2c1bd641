"""Weights that come from a checkpoint: every unit gets its values, and then the model has another version."""

from __future__ import annotations

from rpruntime.optimizer.events import RestoreUnit, UnitRestoredEvent
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import CONTROLLER, Outbox
from rpruntime.wire.messages import RestoredMsg, RestoreMsg, RestoreUnitMsg


class Restores:
    """At most one a model, while nothing else of it is under way."""

    def __init__(self, models: Models, out: Outbox) -> None:
        self._models = models
        self._out = out

    def on_restore(self, msg: RestoreMsg) -> None:
        """One begins: until it ends the weights are neither the old ones nor the new ones."""
        model = self._models[msg.model]
        assert model.running is None and not model.steps and not model.sums.calls
        model.restoring, model.restored, model.torn = msg, set(), True
        model.scales.restore(msg.scaler, msg.version)

    def on_unit(self, msg: RestoreUnitMsg) -> None:
        """A part of a unit's values."""
        restoring = self._models[msg.model].restoring
        assert restoring is not None
        self._out.add(RestoreUnit(msg, restoring.previous))

    def on_restored(self, event: UnitRestoredEvent) -> None:
        """A unit has all its values."""
        model = self._models.get(event.model)
        if model is None or model.restoring is None:
            return
        version = model.restoring.version
        model.master[event.unit] = event.extent
        model.previous[event.unit] = event.extent if event.previous is None else event.previous
        if event.previous is not None:
            model.publish(version - 1, [(event.unit, event.previous)])
        model.publish(version, [(event.unit, event.extent)])
        self._out.send(CONTROLLER, RestoredMsg(event.model, event.request, event.unit))
        model.restored.add(event.unit)
        if len(model.restored) == len(model.spec.units):
            model.restoring, model.torn, model.version = None, False, version
