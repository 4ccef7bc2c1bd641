"""What follows a slot's commit: its data gets its readers, slots that waited go out, its call and step may finish."""

from __future__ import annotations

from rpruntime.control.calls import Calls
from rpruntime.control.cancels import Cancels
from rpruntime.control.events import FinishTask, NoteShortage, NoteTimes
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER
from rpruntime.control.slots import Slots
from rpruntime.control.steps import Steps
from rpruntime.wire.messages import DataReadyMsg, Key, SlabDoneMsg, SlabReadyMsg, SlotCommittedMsg, SlotOverMsg


class Commits:
    """Takes what slots report until they are over."""

    def __init__(
        self,
        models: Models,
        calls: Calls,
        slots: Slots,
        cancels: Cancels,
        steps: Steps,
        lifetimes: Lifetimes,
        out: Outbox,
    ) -> None:
        self._models = models
        self._calls = calls
        self._slots = slots
        self._cancels = cancels
        self._steps = steps
        self._lifetimes = lifetimes
        self._out = out

    def on_data(self, msg: DataReadyMsg) -> None:
        """A slot has published something."""
        if self._slots.take_data(msg) and msg.key[0] == "out":
            self._calls[msg.key[1]].outputs[msg.key[2]] = msg.payload

    def on_slab(self, msg: SlabReadyMsg) -> None:
        """A slot has told the optimizer of gradients."""
        if self._slots.is_running(msg.slot):
            slot = self._slots[msg.slot]
            for part in msg.parts:
                slot.write(("slab", msg.call, msg.slot, msg.position, part.unit), (part.extent,))
            self._calls[msg.call].slabs[msg.slot, msg.position] = (slot.role, msg)

    def on_slab_done(self, msg: SlabDoneMsg) -> None:
        """The optimizer needs these no more; it may be faster than the slot's commit."""
        for slab in msg.slabs:
            key: Key = ("slab", *slab)
            if slab[1] in self._slots:
                self._slots[slab[1]].early_slabs[key] = None
            else:
                self._lifetimes.drop(key)  # without extents where nothing there got a gradient

    def on_committed(self, msg: SlotCommittedMsg) -> None:
        """A slot is over, and with it those whose commits waited for what it has written."""
        if not self._slots.is_running(msg.slot):
            return  # repeated
        model = self._slots[msg.slot].task.model
        self._slots.hold(msg)
        while ready := self._slots.committable():
            for held in ready:
                self._commit(held)
        self._cancels.free_leftovers(model)

    def _commit(self, msg: SlotCommittedMsg) -> None:
        slot = self._slots.commit(msg.slot)
        task = slot.task
        if msg.spans and task.kind != "infer":
            self._out.add(NoteTimes(task.model, msg.spans, msg.peak_bytes))
        if msg.tries > 1:
            self._out.add(NoteShortage(task.model, task.layers))
        for key in slot.early_slabs:
            self._lifetimes.drop(key)
        call = self._calls[task.call]
        call.open_slots.discard(msg.slot)
        for released in self._slots.released_by(msg.slot):
            if not self._cancels.covers(self._slots[released].task):
                self._slots.hand_over(released)
        if self._cancels.cancels_call(task.model, task.call):
            return
        if task.kind in ("fused", "backward"):
            self._out.send(OPTIMIZER, SlotOverMsg(task.model, task.call, msg.slot))
        if call.coverage is not None:
            self._out.add(FinishTask(task.model, task.call, msg.slot, msg.role, msg.spans, msg.tries))
        if not call.is_running:
            self._calls.finish(call)
            self._steps.finish(self._models[task.model])
