"""Iterations that are given up: everything of their calls is forgotten, and the controller is told."""

from __future__ import annotations

from collections import deque

from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import CONTROLLER, ROLE, Outbox
from rpruntime.optimizer.saves import Saves
from rpruntime.wire.messages import CancelledMsg, CancelMsg


class Cancels:
    """Of calls that no running step has taken; `Steps` sees to that."""

    def __init__(self, models: Models, saves: Saves, out: Outbox) -> None:
        self._models = models
        self._saves = saves
        self._out = out

    def carry_out(self, msg: CancelMsg) -> None:
        """Forget the calls, the steps that were to take them, and what was to follow those."""
        model = self._models[msg.model]
        model.forget_open()
        model.buffers.cancel(msg.first_call, msg.last_call)
        gone = model.sums.cancel(msg.first_call, msg.last_call)
        never = [step.step for step in model.steps if gone.intersection(step.calls)]
        if never:
            self._saves.drop_after(model, min(never))
        model.steps = deque(step for step in model.steps if step.step not in never)
        model.reads = [read for read in model.reads if not gone.intersection(read.calls)]
        self._out.send(CONTROLLER, CancelledMsg(msg.model, msg.first_call, ROLE, ()))
