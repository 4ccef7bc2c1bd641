"""The gradients of a model: which are still to come, and in which order they are added (G_cp).

That is (call, first micro-batch, deepest position first), whatever order they arrive in; slot numbers ascend in it.
Gradients of small slots stay where they are until their slot is over: then the weights that it read have made room for
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from rpruntime.optimizer.events import AddSlab, DropSums
from rpruntime.optimizer.outbox import CONTROLLER, Outbox
from rpruntime.wire.messages import ExpectSlabsMsg, ModelSpec, SlabDoneMsg, SlabPart, SlabReadyMsg, SlotOverMsg

SMALL_SLOT = 1 / 4
"""Of the model's trained bytes, at most: the gradients of larger slots are taken as they come. They would all lie in a
worker's memory until the slot's end, and the step would begin that much later."""

SlabId = tuple[int, int, int, int]
"""(call, slot, position, unit)"""
Place = tuple[int, int]
"""(slot, position)"""


@dataclass
class _Sum:
    """One unit's gradients in one iteration."""

    order: deque[SlabId] = field(default_factory=deque)
    """Slabs still to be added, in order."""
    arrived: dict[SlabId, SlabPart | None] = field(default_factory=dict)
    """Those of them that are here; None: the position got no gradient there."""


class Sums:
    """Of all iterations that are not stepped.

    Attributes:
        calls: call -> iteration, for calls whose gradients are wanted.
    """

    def __init__(self, spec: ModelSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self.calls: dict[int, int] = {}
        self._sums: dict[tuple[int, int], _Sum] = {}
        """(iteration, unit) -> its sum."""
        self._waiting: dict[int, set[Place]] = {}
        """Of each of `calls`, whose gradients have not come."""
        self._unwanted: dict[int, set[Place]] = {}
        """The same of discarded calls."""
        self._newest_call = 0
        """The highest call announced so far."""
        self._over: dict[int, set[int]] = {}
        """Of each of `calls`, and of those that are not announced yet, its slots whose gradients need not wait: those
        that are over, and large ones."""
        self._large: set[int] = set()
        """Those of `calls` that have large slots."""
        self._held: dict[int, dict[int, SlabReadyMsg]] = {}
        """Slot -> position -> gradients that have come before their slot was over."""
        self._holds = True

    def have_come(self, calls: Iterable[int]) -> bool:
        """Whether all gradients of these calls are here."""
        return not any(self._waiting[call] for call in calls)

    # --- as they come

    def expect(self, msg: ExpectSlabsMsg) -> list[SlabReadyMsg]:
        """A call's gradients will come. Returns those of its slots that are over; they are to be taken now."""
        self._newest_call = max(self._newest_call, msg.call)
        self.calls[msg.call] = msg.iteration
        self._waiting[msg.call] = {(slot, p) for slot, start, stop in msg.slots for p in range(start, stop)}
        for slot, start, stop in msg.slots:
            for position in reversed(range(start, stop)):
                for unit in self._trainable(position):
                    total = self._sums.setdefault((msg.iteration, unit), _Sum())
                    total.order.append((msg.call, slot, position, unit))
        large = {slot for slot, start, stop in msg.slots if not self._is_small(range(start, stop))}
        if large:
            self._large.add(msg.call)
        over = self._over.setdefault(msg.call, set())
        over |= large
        return self._let_go(over)

    def _is_small(self, positions: range) -> bool:
        units = {unit for position in positions for unit in self._trainable(position)}
        trained = sum(unit.nbytes for unit in self._spec.units if unit.trainable)
        return sum(self._spec.units[unit].nbytes for unit in units) <= trained * SMALL_SLOT

    def come_in_small_slots(self, calls: Iterable[int]) -> bool:
        """Whether no slot of these calls is a large one."""
        return self._large.isdisjoint(calls)

    def _trainable(self, position: int) -> list[int]:
        return [unit for unit in self._spec.layers[position].units if self._spec.units[unit].trainable]

    def hold(self, msg: SlabReadyMsg) -> bool:
        """Whether a position's gradients stay where they are for now; they may have overtaken what announces them."""
        known = msg.call in self.calls
        over_or_gone = msg.slot in self._over[msg.call] if known else msg.call <= self._newest_call
        if over_or_gone or not self._holds:
            return False
        self._held.setdefault(msg.slot, {}).setdefault(msg.position, msg)
        return True

    def end_slot(self, msg: SlotOverMsg) -> list[SlabReadyMsg]:
        """A slot is over. Returns those of its gradients that have come; they are to be taken now."""
        known = msg.call in self.calls
        if known or msg.call > self._newest_call:
            self._over.setdefault(msg.call, set()).add(msg.slot)
        return self._let_go([msg.slot]) if known else []

    def stop_holding(self) -> list[SlabReadyMsg]:
        """Nobody tells any more which slots are over. Returns what was held; it is to be taken now."""
        self._holds = False
        return self._let_go(list(self._held))

    def _let_go(self, slots: Iterable[int]) -> list[SlabReadyMsg]:
        return [msg for slot in slots for msg in self._held.pop(slot, {}).values()]

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
        iteration = self.calls.get(msg.call)
        if iteration is None or place not in self._waiting[msg.call]:
            return False  # cancelled, or repeated
        parts = {part.unit: part for part in msg.parts}
        for slab in slabs:
            total = self._sums[iteration, slab[3]]
            total.arrived[slab] = parts.get(slab[3])
            self._add_what_is_next(iteration, total, whole=whole)
        self._waiting[msg.call].discard(place)
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
            del self.calls[call], self._waiting[call], self._over[call]
        self._large.difference_update(calls)

    def discard(self, calls: tuple[int, ...]) -> None:
        """Gradients of these calls, all of an iteration's, are not wanted: those that come later are turned away."""
        iteration = self.calls[calls[0]]
        for total in (total for (t, _), total in self._sums.items() if t == iteration):
            self._done(list(total.arrived))
        self._drop(iteration)
        for call in calls:
            del self.calls[call], self._over[call]
            self._large.discard(call)
            waiting = self._waiting.pop(call)
            if waiting:
                self._unwanted[call] = waiting
        for msg in self._let_go(self._slots_held(calls)):
            self.take(msg, whole=False)

    def cancel(self, first: int, last: int) -> set[int]:
        """Gradients of calls `first` to `last` are neither wanted nor told to be done; returns those known till now."""
        gone = [call for call in self.calls if first <= call <= last]
        for iteration in {self.calls[call] for call in gone}:
            self._drop(iteration)
        for call in gone:
            del self.calls[call], self._waiting[call]
        for call in [call for call in self._unwanted if first <= call <= last]:
            del self._unwanted[call]
        self._over = {call: slots for call, slots in self._over.items() if not first <= call <= last}
        self._large = {call for call in self._large if not first <= call <= last}
        self._let_go(self._slots_held(range(first, last + 1)))
        self._newest_call = max(self._newest_call, last)
        return set(gone)

    def _slots_held(self, calls: Container[int]) -> list[int]:
        """Slots of these calls that have gradients here."""
        return [slot for slot, held in self._held.items() if next(iter(held.values())).call in calls]

    def _drop(self, iteration: int) -> None:
        self._sums = {key: total for key, total in self._sums.items() if key[0] != iteration}
        self._out.add(DropSums(self._spec.model, iteration))

    def left_by(self, calls: tuple[int, ...], iteration: int) -> Sums:
        """What the next controller finds: the sums of these calls, which have all come; nothing if there is no call."""
        assert self.calls.keys() >= set(calls), "kept calls that nobody knows"
        left = Sums(self._spec, self._out)
        left.calls = dict.fromkeys(calls, iteration)
        left._waiting = {call: set() for call in calls}
        left._over = {call: set() for call in calls}
        left._large = self._large.intersection(calls)
        left._sums = {key: total for key, total in self._sums.items() if calls and key[0] == iteration}
        left._newest_call = self._newest_call
        return left
