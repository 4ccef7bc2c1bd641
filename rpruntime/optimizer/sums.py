"""The gradients of a model: which are still to come, and in which order they are added (G_cp).

That is (call, first micro-batch, deepest position first), whatever order they arrive in; slot numbers ascend in it.
When asynchronous, gradients of small slots stay where they are until their slot is over: then the weights that it read
have made room for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rpruntime.optimizer.events import AddSlab, DropSums
from rpruntime.optimizer.outbox import CONTROLLER, Outbox
from rpruntime.wire.messages import (
    ExpectSlabsMsg,
    ModelSpec,
    SlabDoneMsg,
    SlabPart,
    SlabReadyMsg,
    SlotOverMsg,
    UnitSpec,
)

SlabId = tuple[int, int, int, int]
"""(call, slot, position, unit)"""
Place = tuple[int, int]
"""(slot, position)"""


SMALL_SLOT = 1 / 4


def is_small_slot(units: Iterable[UnitSpec], trained_bytes: int) -> bool:
    """Whether a backward slot with these trainable units has at most a quarter of a model that has `trained_bytes` of
    them. Gradients of larger ones would fill a worker's memory if they waited, and the step would begin that much
    later."""
    return sum(unit.nbytes for unit in units) <= trained_bytes * SMALL_SLOT


@dataclass
class _Sum:
    """One unit's gradients in one iteration."""

    order: deque[SlabId] = field(default_factory=deque)
    """Slabs still to be added, in order."""
    arrived: dict[SlabId, SlabPart | None] = field(default_factory=dict)
    """Those of them that are here; None: the position got no gradient there."""


@dataclass
class _Call:
    """The gradients of one call."""

    iteration: int | None = None
    """None: nothing has announced it, but some of its gradients, or the end of a slot, were faster."""
    waiting: set[Place] = field(default_factory=set)
    """Whose gradients have not been taken."""
    ready: set[int] = field(default_factory=set)
    """Slots whose gradients need not wait."""
    held: dict[Place, SlabReadyMsg] = field(default_factory=dict)
    """Those that have come and do."""

    def let_go(self, slots: Iterable[int]) -> list[SlabReadyMsg]:
        """What is held of these slots."""
        return [self.held.pop(place) for place in list(self.held) if place[0] in slots]


class Sums:
    """Of all iterations that are not stepped."""

    def __init__(self, spec: ModelSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._trained_bytes = sum(unit.nbytes for unit in spec.units if unit.trainable)
        self._calls: dict[int, _Call] = {}
        self._sums: dict[tuple[int, int], _Sum] = {}
        """(iteration, unit) -> its sum."""
        self._unwanted: dict[int, set[Place]] = {}
        """Of discarded calls, whose gradients have not come."""
        self._last_past = 0
        """The highest call that was stepped or discarded: nothing of it or a lower one is still to be announced."""
        self._holds = True

    @property
    def calls(self) -> dict[int, int]:
        """Call -> iteration, for calls whose gradients are wanted."""
        return {number: call.iteration for number, call in self._calls.items() if call.iteration is not None}

    def have_come(self, calls: Iterable[int]) -> bool:
        """Whether all gradients of these calls are here."""
        return not any(self._calls[call].waiting for call in calls)

    # --- as they come

    def expect(self, msg: ExpectSlabsMsg) -> list[SlabReadyMsg]:
        """A call's gradients will come. Returns those that are here and need not wait; they are to be taken now."""
        call = self._calls.setdefault(msg.call, _Call())
        call.iteration = msg.iteration
        for slot, start, stop in msg.slots:
            for position in reversed(range(start, stop)):
                call.waiting.add((slot, position))
                for unit in self._trainable(position):
                    total = self._sums.setdefault((msg.iteration, unit), _Sum())
                    total.order.append((msg.call, slot, position, unit))
            if not self._spec.asynchronous or not self._is_small(range(start, stop)):
                call.ready.add(slot)
        return call.let_go(call.ready)

    def _is_small(self, positions: range) -> bool:
        units = {unit for position in positions for unit in self._trainable(position)}
        return is_small_slot((self._spec.units[unit] for unit in units), self._trained_bytes)

    def _trainable(self, position: int) -> list[int]:
        return [unit for unit in self._spec.layers[position].units if self._spec.units[unit].trainable]

    def hold(self, msg: SlabReadyMsg) -> bool:
        """Whether a position's gradients stay where they are for now; they may have overtaken what announces them."""
        if not self._holds or self._is_past(msg.call):
            return False
        call, place = self._calls.setdefault(msg.call, _Call()), (msg.slot, msg.position)
        if call.iteration is not None and (msg.slot in call.ready or place not in call.waiting):
            return False
        call.held.setdefault(place, msg)
        return True

    def end_slot(self, msg: SlotOverMsg) -> list[SlabReadyMsg]:
        """A slot is over; its call may be announced later. Returns those of its gradients that are to be taken now."""
        if self._is_past(msg.call):
            return []
        call = self._calls.setdefault(msg.call, _Call())
        call.ready.add(msg.slot)
        return call.let_go([msg.slot]) if call.iteration is not None else []

    def _is_past(self, call: int) -> bool:
        """Whether a call was stepped or discarded. What comes late of a cancelled one is held, and goes with the next
        step."""
        return call not in self._calls and call <= self._last_past

    def _pass(self, calls: Iterable[int]) -> None:
        """These calls are over, and what nobody has announced until now is of cancelled ones."""
        self._last_past = max((self._last_past, *calls))
        announced = self.calls
        self._calls = {n: call for n, call in self._calls.items() if n in announced or n > self._last_past}

    def stop_holding(self) -> list[SlabReadyMsg]:
        """Nobody tells any more which slots are over. Returns what was held; it is to be taken now."""
        self._holds = False
        return [msg for call in self._calls.values() for msg in call.let_go({slot for slot, _ in call.held})]

    def take(self, msg: SlabReadyMsg, *, whole: bool) -> bool:
        """A position's gradients are to be added.

        Args:
            msg: which; whatever is not added is done with at once.
            whole: whether they are added; no: others are missing in the sums, and these would be of no use.

        Returns:
            Whether a call waited for them.
        """
        slabs = [(msg.call, msg.slot, msg.position, unit) for unit in self._trainable(msg.position)]
        place = (msg.slot, msg.position)
        if msg.call in self._unwanted:
            self._turn_away(msg.call, place, slabs)
            return False
        call = self._calls.get(msg.call)
        if call is None or call.iteration is None or place not in call.waiting:
            return False  # cancelled, or repeated
        parts = {part.unit: part for part in msg.parts}
        for slab in slabs:
            total = self._sums[call.iteration, slab[3]]
            total.arrived[slab] = parts.get(slab[3])
            self._add_what_is_next(call.iteration, total, whole=whole)
        call.waiting.discard(place)
        return True

    def _turn_away(self, call: int, place: Place, slabs: list[SlabId]) -> None:
        if place in self._unwanted[call]:
            self._unwanted[call].discard(place)
            self._done(slabs)
        if not self._unwanted[call]:
            del self._unwanted[call]

    def _add_what_is_next(self, iteration: int, total: _Sum, *, whole: bool) -> None:
        while total.order and total.order[0] in total.arrived:
            slab = total.order.popleft()
            part = total.arrived.pop(slab)
            if part is not None and whole:
                self._out.add(AddSlab(self._spec.model, iteration, part))
            self._done([slab])

    def _done(self, slabs: list[SlabId]) -> None:
        if slabs:
            self._out.send(CONTROLLER, SlabDoneMsg(tuple(slabs)))

    # --- as they go

    def stepped(self, iteration: int, calls: Iterable[int]) -> None:
        """An iteration is over, and so are its calls."""
        self._drop(iteration)
        for call in calls:
            del self._calls[call]
        self._pass(calls)

    def discard(self, calls: tuple[int, ...]) -> None:
        """Gradients of these calls, all of an iteration's, are not wanted: those that come later are turned away."""
        iteration = self.calls[calls[0]]
        for total in (total for (t, _), total in self._sums.items() if t == iteration):
            self._done(list(total.arrived))
        self._drop(iteration)
        gone = {number: self._calls.pop(number) for number in calls}
        self._pass(calls)
        self._unwanted |= {number: call.waiting for number, call in gone.items() if call.waiting}
        for call in gone.values():
            for msg in call.held.values():
                self.take(msg, whole=False)

    def cancel(self, first: int, last: int) -> set[int]:
        """Gradients of calls `first` to `last` are neither wanted nor told to be done; returns those known till now."""
        gone = {call: iteration for call, iteration in self.calls.items() if first <= call <= last}
        for iteration in set(gone.values()):
            self._drop(iteration)
        self._calls = {number: call for number, call in self._calls.items() if not first <= number <= last}
        for number in [number for number in self._unwanted if first <= number <= last]:
            del self._unwanted[number]
        return set(gone)

    def _drop(self, iteration: int) -> None:
        self._sums = {key: total for key, total in self._sums.items() if key[0] != iteration}
        self._out.add(DropSums(self._spec.model, iteration))

    def left_by(self, calls: tuple[int, ...], iteration: int) -> Sums:
        """What the next controller finds: the sums of these calls, which have all come; nothing if there is no call."""
        assert self.calls.keys() >= set(calls), "kept calls that nobody knows"
        left = Sums(self._spec, self._out)
        left._calls = {call: _Call(iteration) for call in calls}
        left._sums = {key: total for key, total in self._sums.items() if calls and key[0] == iteration}
        left._last_past = self._last_past
        return left
