"""The tasks of a call: for every slot what it reads, what it publishes and for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rpruntime.control.coverage import Coverage, TaskOrder
from rpruntime.control.events import CallEvent
from rpruntime.schedule.dispatch import Slot, dispatch_call, dispatch_inference
from rpruntime.wire.messages import Key, SlotTask

CONTROLLER = "controller"


@dataclass
class CallTasks:
    """All of a call, or those that were submitted together, by slot number (ascending is dispatch order)."""

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
    """Tasks of a call under its plan, starting at slot number `first_slot` on device `first_device`.

    An inference call reads buffers and leaves them as they are.
    """
    assert event.plan is not None
    dispatch = dispatch_inference if event.inference else dispatch_call
    sequence = dispatch(event.plan, len(event.inputs), len(workers), first_device)
    orders = dict(enumerate(map(_order, sequence), first_slot))
    roles = {number: workers[slot.device] for number, slot in enumerate(sequence, first_slot)}
    planner = _Planner(event, orders, roles, version, grain, buffered, buffers_from, event.plan.num_layers)
    return planner.plan()


def plan_tasks(
    event: CallEvent,
    orders: Mapping[int, TaskOrder],
    roles: Mapping[int, str],
    coverage: Coverage,
    *,
    version: int,
    grain: str,
    buffers_from: tuple[int, int],
) -> CallTasks:
    """Tasks that were submitted together, by slot; `coverage`: with them. Who comes later hears from the controller."""
    planner = _Planner(
        event, orders, roles, version, grain, coverage.buffered, buffers_from, coverage.num_layers, coverage
    )
    return planner.plan()


def slabs_in_order(orders: Mapping[int, TaskOrder]) -> tuple[tuple[int, int, int], ...]:
    """(slot, start, stop) of slots that leave gradients, in the order in which these are added: first micro-batch, then
    deepest layer, whatever the order in which the slots were submitted."""
    found = [
        (order.microbatches[0], -order.layers.start, slot, order.layers.start, order.layers.stop)
        for slot, order in orders.items()
        if order.kind != "forward"
    ]
    return tuple((slot, start, stop) for _, _, slot, start, stop in sorted(found))


def _order(slot: Slot) -> TaskOrder:
    return TaskOrder(slot.kind, slot.layers, tuple(slot.microbatches))


class _Planner:
    def __init__(
        self,
        event: CallEvent,
        orders: Mapping[int, TaskOrder],
        roles: Mapping[int, str],
        version: int,
        grain: str,
        buffered: frozenset[int],
        buffers_from: tuple[int, int],
        num_layers: int,
        coverage: Coverage | None = None,
    ) -> None:
        self._event = event
        self._orders = orders
        self._roles = dict(roles)
        self._version = version
        self._grain = grain
        self._buffered = buffered
        self._tasks = CallTasks(buffers_from, roles=self._roles)
        self._num_layers = num_layers
        self._coverage = coverage
        self._readers: dict[Key, list[int]] = {}

    def plan(self) -> CallTasks:
        for number, order in self._orders.items():
            self._tasks.reads[number] = list(self._reads(order))
            for key in self._tasks.reads[number]:
                self._readers.setdefault(key, []).append(number)
        for number, order in self._orders.items():
            self._tasks.slots[number] = self._task(number, order)
        count = len(self._event.inputs)
        self._tasks.input_readers = tuple(self._roles_reading(("act", self._event.call, m, 0)) for m in range(count))
        self._tasks.label_readers = tuple(
            (*self._roles_reading(("label", self._event.call, m)), "")[0] for m in range(count)
        )
        self._tasks.slabs = tuple(
            (number, order.layers.start, order.layers.stop)
            for number, order in self._orders.items()
            if order.kind in ("fused", "backward")
        )
        if self._event.wants_output:
            self._tasks.outputs = tuple(("out", self._event.call, m) for m in range(count))
        return self._tasks

    def _active(self, order: TaskOrder) -> tuple[int, ...]:
        """The slot's micro-batches; one of weight 0 has no backward."""
        if order.kind != "backward":
            return order.microbatches
        return tuple(m for m in order.microbatches if self._event.weights[m] != 0)

    def _task(self, number: int, order: TaskOrder) -> SlotTask:
        call, start = self._event.call, order.layers.start
        publish = []
        grad_to: tuple[str, ...] = ()
        if order.kind in ("fused", "backward") and start > 0:
            active = [m for m in order.microbatches if self._event.weights[m] != 0]
            grad_to = self._roles_reading(*(("agrad", call, m, start) for m in active))
            if self._coverage is not None and any(self._coverage.backward[m] == start for m in active):
                grad_to = (*grad_to, CONTROLLER)
        if order.kind != "backward":
            for position in range(start + 1, order.layers.stop + 1):
                # one of weight 0 has fewer readers than the others
                keys = [("act", call, m, position) for m in order.microbatches]
                roles = self._roles_reading(*keys, besides=number)
                if roles or self._may_be_read_later(order, position):
                    publish.append((position, roles))
        return SlotTask(
            slot=number,
            call=call,
            model=self._event.model,
            kind=order.kind,
            layers=(start, order.layers.stop),
            microbatches=self._active(order),
            version=self._version,
            publish=tuple(publish),
            grad_to=grad_to,
            buffer_to=self._buffer_readers(number, order),
        )

    def _may_be_read_later(self, order: TaskOrder, position: int) -> bool:
        if self._coverage is None or position == self._num_layers:
            return False
        return not all(self._coverage.is_known(m, position) for m in order.microbatches)

    def _buffer_readers(self, number: int, order: TaskOrder) -> tuple[str, ...]:
        if order.kind not in ("forward", "fused"):
            return ()
        keys = [
            ("buffer", self._event.call, m, position)
            for position in order.layers
            if position in self._buffered
            for m in order.microbatches
        ]
        return self._roles_reading(*keys, besides=number)

    def _roles_reading(self, *keys: Key, besides: int = 0) -> tuple[str, ...]:
        readers = [number for key in keys for number in self._readers.get(key, ()) if number != besides]
        return tuple(dict.fromkeys(self._roles[number] for number in readers))

    def _reads(self, order: TaskOrder) -> list[Key]:
        call, start, stop = self._event.call, order.layers.start, order.layers.stop
        keys: list[Key] = []
        for m in self._active(order):
            keys.append(("act", call, m, start))
            if order.kind == "backward":
                keys.append(("agrad", call, m, stop))
                if self._grain == "layer":
                    keys += [("act", call, m, position) for position in range(start + 1, stop)]
            if stop == self._num_layers and order.kind != "backward" and self._event.labels[m] is not None:
                keys.append(("label", call, m))
            for position in range(start, stop):
                if position in self._buffered:
                    before = self._tasks.buffers_from if m == 0 or order.kind == "infer" else (call, m - 1)
                    keys.append(("buffer", *before, position))
        return keys
