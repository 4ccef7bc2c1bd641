"""Gradients as they come, what waits for them, and questions about them."""

from __future__ import annotations

from rpruntime.optimizer.events import ReadState
from rpruntime.optimizer.model import Model
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import Outbox
from rpruntime.optimizer.steps import Steps
from rpruntime.optimizer.succession import Succession
from rpruntime.wire.messages import DiscardMsg, ExpectSlabsMsg, ReadStateMsg, SlabReadyMsg, SlotOverMsg


class Gradients:
    """Tells each model's sums, and whoever may have waited for the last gradient."""

    def __init__(self, models: Models, steps: Steps, succession: Succession, out: Outbox) -> None:
        self._models = models
        self._steps = steps
        self._succession = succession
        self._out = out

    def on_expect(self, msg: ExpectSlabsMsg) -> None:
        """A call of the open iteration begins, which changes what an older controller has left of it."""
        model = self._models[msg.model]
        model.open = None
        model.read_versions[msg.iteration] = msg.version
        for slab in model.sums.expect(msg):
            self._take(model, slab)

    def on_slab(self, msg: SlabReadyMsg) -> None:
        """A position's gradients have come, maybe of a model that is gone."""
        model = self._models.get(msg.model)
        if model is not None and not model.sums.hold(msg):
            self._take(model, msg)

    def on_slot_over(self, msg: SlotOverMsg) -> None:
        """A slot has committed, and the weights that it read are free if nobody else reads them."""
        model = self._models.get(msg.model)
        if model is not None:
            for slab in model.sums.end_slot(msg):
                self._take(model, slab)

    def _take(self, model: Model, msg: SlabReadyMsg) -> None:
        if model.sums.take(msg, whole=not model.failed):
            self._steps.start(model)
            self._answer_reads(model)
            self._succession.keep_open(model)

    def on_discard(self, msg: DiscardMsg) -> None:
        """The script discards the open iteration's gradients."""
        model = self._models[msg.model]
        model.forget_open()
        model.reads = [read for read in model.reads if not set(read.calls).intersection(msg.calls)]
        if msg.calls:
            model.sums.discard(msg.calls)

    def on_read(self, msg: ReadStateMsg) -> None:
        """The script asks for gradients, or for the optimizer's state."""
        model = self._models[msg.model]
        if not model.failed and all(call in model.sums.calls for call in msg.calls):  # else they are being cancelled
            model.reads.append(msg)
            self._answer_reads(model)

    def _answer_reads(self, model: Model) -> None:
        for msg in list(model.reads):
            if not model.sums.have_come(msg.calls):
                continue
            model.reads.remove(msg)
            iteration = model.sums.calls[msg.calls[0]] if msg.calls else -1
            inverse = model.inverse(iteration) if msg.calls else 1.0
            self._out.add(ReadState(msg, iteration, inverse))
