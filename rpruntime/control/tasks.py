"""The tasks of one call: for every slot of the dispatch sequence what it reads, what it publishes and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rpruntime.control.events import CallEvent
from rpruntime.schedule.dispatch import Slot, dispatch_call, dispatch_inference
from rpruntime.wire.messages import Key, SlotTask


@dataclass
class CallTasks:
    """All of a call, by slot number (ascending is dispatch order)."""

    buffers_from: tuple[int, int]
    slots: dict[int, SlotTask] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    reads: dict[int, list[Key]] = field(default_factory=dict)
    slabs: tuple[tuple[int, int, int], ...] = ()
    """(slot, start, stop) of the slots that leave gradients, in the order in which they are added."""
    input_readers: tuple[tuple[str, ...], ...] = ()
    """Who reads the call's own inputs, for each micro-batch."""
    label_readers: tuple[str, ...] = ()
    """Who reads the labels, for each micro-batch."""
    outputs: tuple[Key, ...] = ()


def plan_call(
    event: CallEvent,
    workers: Sequence[str],
    *,
    first_slot: int,
    first_device: int,
    version: int,
    grain: str,
    buffered: frozenset[int],
    buffers_from: tuple[int, int],
) -> CallTasks:
    """Tasks of a training call under its plan, starting at slot number `first_slot` on device `first_device`."""
    sequence = dispatch_call(event.plan, len(event.inputs), len(workers), first_device)
    return _Planner(event, sequence, workers, first_slot, version, grain, buffered, buffers_from).plan()


def plan_inference(
    event: CallEvent,
    workers: Sequence[str],
    *,
    first_slot: int,
    first_device: int,
    version: int,
    grain: str,
    buffered: frozenset[int],
    buffers_from: tuple[int, int],
) -> CallTasks:
    """Tasks of a forward pass without gradients; buffers are read and left as they are."""
    sequence = dispatch_inference(event.plan, len(event.inputs), len(workers), first_device)
    return _Planner(event, sequence, workers, first_slot, version, grain, buffered, buffers_from).plan()


class _Planner:
    def __init__(
        self,
        event: CallEvent,
        sequence: list[Slot],
        workers: Sequence[str],
        first_slot: int,
        version: int,
        grain: str,
        buffered: frozenset[int],
        buffers_from: tuple[int, int],
    ) -> None:
        self._event = event
        self._numbered = list(enumerate(sequence, first_slot))
        self._roles = {number: workers[slot.device] for number, slot in self._numbered}
        self._version = version
        self._grain = grain
        self._buffered = buffered
        self._tasks = CallTasks(buffers_from, roles=self._roles)
        self._num_layers = event.plan.num_layers
        self._readers: dict[Key, list[int]] = {}

    def plan(self) -> CallTasks:
        for number, slot in self._numbered:
            self._tasks.reads[number] = list(self._reads(slot))
            for key in self._tasks.reads[number]:
                self._readers.setdefault(key, []).append(number)
        for number, slot in self._numbered:
            self._tasks.slots[number] = self._task(number, slot)
        count = len(self._event.inputs)
        self._tasks.input_readers = tuple(self._roles_reading(("act", self._event.call, m, 0)) for m in range(count))
        self._tasks.label_readers = tuple(
            (*self._roles_reading(("label", self._event.call, m)), "")[0] for m in range(count)
        )
        self._tasks.slabs = tuple(
            (number, slot.layers.start, slot.layers.stop)
            for number, slot in self._numbered
            if slot.kind in ("fused", "backward")
        )
        if self._event.wants_output:
            self._tasks.outputs = tuple(("out", self._event.call, m) for m in range(count))
        return self._tasks

    def _active(self, slot: Slot) -> tuple[int, ...]:
        """The slot's micro-batches; one of weight 0 has no backward."""
        if slot.kind != "backward":
            return tuple(slot.microbatches)
        return tuple(m for m in slot.microbatches if self._event.weights[m] != 0)

    def _task(self, number: int, slot: Slot) -> SlotTask:
        call = self._event.call
        publish = []
        grad_to: tuple[str, ...] = ()
        if slot.kind == "backward" or slot.kind == "fused":
            active = [m for m in slot.microbatches if self._event.weights[m] != 0]
            if active and slot.layers.start > 0:
                grad_to = self._roles_reading(("agrad", call, active[0], slot.layers.start))
        if slot.kind != "backward":
            for position in range(slot.layers.start + 1, slot.layers.stop + 1):
                # one of weight 0 has fewer readers than the others
                keys = [("act", call, m, position) for m in slot.microbatches]
                roles = self._roles_reading(*keys, besides=number)
                if roles:
                    publish.append((position, roles))
        return SlotTask(
            slot=number,
            call=call,
            model=self._event.model,
            kind=slot.kind,
            layers=(slot.layers.start, slot.layers.stop),
            microbatches=self._active(slot),
            version=self._version,
            publish=tuple(publish),
            grad_to=grad_to,
            buffer_to=self._buffer_readers(number, slot),
        )

    def _buffer_readers(self, number: int, slot: Slot) -> tuple[str, ...]:
        if slot.kind not in ("forward", "fused"):
            return ()
        keys = [
            ("buffer", self._event.call, m, position)
            for position in slot.layers
            if position in self._buffered
            for m in slot.microbatches
        ]
        return self._roles_reading(*keys, besides=number)

    def _roles_reading(self, *keys: Key, besides: int = 0) -> tuple[str, ...]:
        readers = [number for key in keys for number in self._readers.get(key, ()) if number != besides]
        return tuple(dict.fromkeys(self._roles[number] for number in readers))

    def _reads(self, slot: Slot) -> list[Key]:
        call, start, stop = self._event.call, slot.layers.start, slot.layers.stop
        keys: list[Key] = []
        for m in self._active(slot):
            keys.append(("act", call, m, start))
            if slot.kind == "backward":
                keys.append(("agrad", call, m, stop))
                if self._grain == "layer":
                    keys += [("act", call, m, position) for position in range(start + 1, stop)]
            if stop == self._num_layers and slot.kind != "backward" and self._event.labels[m] is not None:
                keys.append(("label", call, m))
            for position in range(start, stop):
                if position in self._buffered:
                    before = self._tasks.buffers_from if m == 0 or slot.kind == "infer" else (call, m - 1)
                    keys.append(("buffer", *before, position))
        return keys
