"""What happens between the iterations of a model: steps, gradients that are not wanted, another loss scale."""

from __future__ import annotations

from rpruntime.control.calls import Calls
from rpruntime.control.cancels import Cancels
from rpruntime.control.events import DiscardEvent, FinishStep, SetScalerEvent, StepEvent
from rpruntime.control.model import Model
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER
from rpruntime.wire.messages import DiscardMsg, SetScalerMsg, StepDoneMsg, StepMsg


class Steps:
    """From the script's `step()` to the end of the iteration."""

    def __init__(self, models: Models, calls: Calls, cancels: Cancels, out: Outbox) -> None:
        self._models = models
        self._calls = calls
        self._cancels = cancels
        self._out = out

    def on_step(self, event: StepEvent) -> None:
        """Seal the open iteration."""
        model = self._models[event.model]
        wanted = tuple(model.open.wanted)
        assert wanted
        msg = StepMsg(event.model, model.iteration, wanted, event.groups, event.max_grad_norm, model.head)
        self._out.send(OPTIMIZER, msg)
        model.seal()

    def on_discard(self, event: DiscardEvent) -> None:
        """Forget the gradients of the open iteration."""
        iteration = self._models[event.model].open
        self._out.send(OPTIMIZER, DiscardMsg(event.model, tuple(iteration.wanted)))
        iteration.wanted = []

    def on_set_scaler(self, event: SetScalerEvent) -> None:
        """Later iterations use another loss scale."""
        model = self._models[event.model]
        assert not model.open.wanted and not model.unfinished_steps()
        read, newest = model.version_read(), model.iteration
        scales = model.versions.set_scales = {newest: event.state.scale}
        if read < newest:
            scales[read] = event.state.scale if event.previous is None else event.previous
        self._out.send(OPTIMIZER, SetScalerMsg(event.model, event.state, tuple(sorted(scales.items()))))

    def on_done(self, msg: StepDoneMsg) -> None:
        """The optimizer has done a step; maybe it says so again, or of one that was given up."""
        if msg.model not in self._models:
            return
        model = self._models[msg.model]
        if msg.step in model.unfinished_steps() and model.iterations[msg.step].done is None:
            model.iterations[msg.step].done = msg
            self._cancels.check(model)
            self.finish(model)

    def finish(self, model: Model) -> None:
        """A step's gradients can overtake the commits of the slots that they came from: it finishes after both."""
        for step in model.unfinished_steps():
            iteration = model.iterations[step]
            if iteration.done is None or self._cancels.takes_along(model.number, step):
                return
            if any(self._calls[call].open_slots for call in iteration.calls):
                return
            model.close(step)
            self._calls.remove(iteration.calls)
            self._out.add(FinishStep(model.number, iteration.done))
