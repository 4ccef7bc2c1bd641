"""Arenas of a run that has not been started, walked through: what is allocated and freed, in which order.

The allocator and the rules by which arenas grow are those of the run (`rpruntime/store/arena.py`); only the memory is
not there. Fragments between extents count so, and segments that are made because no run of free bytes is long enough.

When bytes are freed depends on messages, so there are two walks: `PROMPT`, in which they go as early as they can, and
`LATE`, in which they go as late as they may.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.meta_run import LayerCost
from rpruntime.layout import ModelLayout
from rpruntime.loading import gradient_bytes
from rpruntime.optimizer.sums import is_small_slot
from rpruntime.optimizer.units import SHARED_STATE_BYTES
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.allocator import align
from rpruntime.store.arena import GRADIENTS, Arena, Store
from rpruntime.store.handle import Extent
from rpruntime.store.layout import (
    gradient_layout,
    is_replaced_in_place,
    optimizer_dtype,
    optimizer_layout,
    spare_bytes,
    tensor_bytes,
)

MESSAGE_BYTES = 64 << 20
"""Weights that the optimizer writes while it waits for a message: small units are stepped faster than it comes."""


@dataclass(frozen=True)
class Timing:
    """When bytes are freed.

    Attributes:
        weight_bytes: of new weights that are written before a unit's old ones go.
        slots: that pass, once a slot has committed, before its gradients go, and the weights that it read; its inputs
            too, but with one device they go at once.
    """

    weight_bytes: int
    slots: int


PROMPT = Timing(0, 0)
LATE = Timing(MESSAGE_BYTES, 1)


class _Nothing:
    """Segments that have a name and a size, and no memory."""

    def __init__(self) -> None:
        self._count = 0
        self._mapping = mmap.mmap(-1, 1)

    def create(self, nbytes: int) -> tuple[str, mmap.mmap]:
        self._count += 1
        return f"paper-{self._count}", self._mapping

    def open(self, segment: str) -> mmap.mmap:
        return self._mapping

    def forget(self, segment: str) -> None:
        """Nothing is mapped."""

    def release(self, segment: str) -> None:
        """Nothing is there."""

    def give(self, segment: str) -> None:
        """Nobody else is there."""

    def segments_of(self, owner: str) -> list[tuple[str, int]]:
        return []


class _NoBytes(Store):
    def bytes_of(self, extent: Extent) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


class PaperArena(Arena):
    """An arena without memory. `live`: bytes in extents now; `peak`: the most of them so far."""

    def __init__(self, owner: str) -> None:
        source = _Nothing()
        super().__init__(owner, source, _NoBytes(source))
        self.live = 0
        self.peak = 0

    def allocate(self, nbytes: int, kind: str = "") -> Extent:
        """As `Arena.allocate`."""
        extent = super().allocate(nbytes, kind)
        self.live += align(nbytes)
        self.peak = max(self.peak, self.live)
        return extent

    def free(self, extent: Extent) -> None:
        """As `Arena.free`."""
        super().free(extent)
        self.live -= align(extent.nbytes)

    def make_room(self, nbytes: int) -> None:
        """As the optimizer does before it allocates so much."""
        if nbytes > self.total_bytes - self.live:
            self.reserve(nbytes)


# --- the optimizer


def walk_optimizer(
    layout: ModelLayout,
    states: int,
    prepared: bool,
    asynchronous: bool,
    timing: Timing,
    plans: Sequence[ExecutionPlan],
) -> PaperArena:
    """Load a model and take three steps under each plan.

    Args:
        layout: of the model.
        states: tensors that the optimizer keeps for each parameter.
        prepared: whether room for these is made at load; else the first step makes it, one tensor after the other.
        asynchronous: see `spare_bytes`.
        timing: when old weights go.
        plans: in whose backward stages gradients come.
    """
    arena = PaperArena("optimizer")
    arena.make_room(sum(unit.nbytes for unit in layout.units))
    masters = {unit.index: arena.allocate(unit.nbytes) for unit in layout.units}
    trained = sorted((unit for unit in layout.units if unit.trainable), key=lambda unit: unit.positions[0])
    arena.make_room(sum(optimizer_layout(unit)[1] for unit in trained))
    for unit in layout.units:
        if unit.trainable:
            arena.allocate(optimizer_layout(unit)[1])
    state_sizes = {unit.index: [size for size in _state_sizes(unit) for _ in range(states)] for unit in trained}
    if prepared:
        arena.make_room(sum(sum(sizes) for sizes in state_sizes.values()))
        for unit in layout.units:
            for size in state_sizes.pop(unit.index, []):
                arena.allocate(size)
    arena.make_room(spare_bytes(layout.units, asynchronous))
    previous: dict[int, Extent] = {}
    """Asynchronous: weights that the iteration reads while newer ones are there."""
    for plan in plans:
        for _ in range(3):
            kept = _backward(arena, layout, plan, previous, timing)
            for size in (size for unit in trained for size in state_sizes.pop(unit.index, [])):
                arena.allocate(size)
            older = _step(arena, trained, masters, kept, timing, asynchronous)
            if asynchronous:
                previous = older
    return arena


def _trained(layout: ModelLayout, stage: range) -> Iterator[Any]:
    """The units of a stage that get gradients, deepest layer first; a shared one at each of its layers."""
    for position in reversed(stage):
        yield from (unit for unit in map(layout.units.__getitem__, layout.layer_units[position]) if unit.trainable)


def _backward(
    arena: PaperArena, layout: ModelLayout, plan: ExecutionPlan, previous: dict[int, Extent], timing: Timing
) -> dict[int, Extent]:
    """The weights that a small slot has read go, then its gradients come, deepest first; a large one's come before.
    Returns where each unit's are."""
    kept: dict[int, Extent] = {}
    leaving: deque[list[Extent]] = deque()
    trained_bytes = sum(unit.nbytes for unit in layout.units if unit.trainable)
    for stage in plan.backward:
        units = list(_trained(layout, stage))
        read = [u for position in stage for u in layout.layer_units[position] if layout.units[u].positions[0] in stage]
        leaving.append([previous.pop(number) for number in read if number in previous])
        is_small = is_small_slot({unit.index: unit for unit in units}.values(), trained_bytes)
        # late: a newer version is not written yet
        while len(leaving) > timing.slots + (0 if is_small else 1):
            arena.free_all(leaving.popleft())
        for unit in units:
            first = kept.get(unit.index)
            nbytes = gradient_layout(unit)[1]
            if first is None:
                kept[unit.index] = arena.allocate(nbytes)
            elif first.nbytes == nbytes != optimizer_layout(unit)[1]:  # shared: what comes now is added, in fp32
                kept[unit.index] = arena.allocate(optimizer_layout(unit)[1])
                arena.free(first)
    for extents in leaving:
        arena.free_all(extents)
    return kept


def _step(
    arena: PaperArena,
    trained: Sequence[Any],
    masters: dict[int, Extent],
    kept: dict[int, Extent],
    timing: Timing,
    asynchronous: bool,
) -> dict[int, Extent]:
    """New weights take the place of gradients, or a place of their own. Returns the old ones, if they stay."""
    older, added = {}, []
    leaving: deque[Extent] = deque()
    written = 0
    for unit in trained:
        old = masters[unit.index]
        if is_replaced_in_place(unit):
            masters[unit.index] = kept[unit.index]
        else:
            # synchronous: the newest of the old ones is never free yet when the next unit's step begins
            while len(leaving) > 1 and written > timing.weight_bytes:
                written -= leaving[0].nbytes
                arena.free(leaving.popleft())
            masters[unit.index] = arena.allocate(unit.nbytes)
            written += unit.nbytes
            added.append(kept[unit.index])
        if asynchronous:
            older[unit.index] = old
        else:
            leaving.append(old)
    arena.free_all([*leaving, *added])
    return older


def _state_sizes(unit: Any) -> Iterator[int]:
    """Of each parameter, what one state tensor takes in shared memory."""
    for param in unit.params:
        nbytes = tensor_bytes(param.shape, optimizer_dtype(param.dtype))
        if nbytes >= SHARED_STATE_BYTES:
            yield align(nbytes)


# --- the workers


class WorkersWalk:
    """The workers' arenas over iterations with one call each. Devices take turns; a slot goes to the next one."""

    def __init__(
        self,
        layout: ModelLayout,
        costs: Sequence[LayerCost],
        num_devices: int,
        num_microbatches: int,
        timing: Timing,
    ) -> None:
        self._layout, self._costs = layout, costs
        self._num_microbatches = num_microbatches
        self._timing = timing
        self.arenas = [PaperArena(f"worker-{index}") for index in range(num_devices)]
        for arena in self.arenas:
            arena.reserve(gradient_bytes(layout) // num_devices, GRADIENTS)
        self.most_activations = 0
        """Bytes between layers in all arenas together, at most."""
        self._activations = 0
        self._alive: dict[tuple[str, int], list[Extent]] = {}
        """(what, position) -> extents, of the iteration that runs."""
        self._committed: deque[list[Extent]] = deque()
        """Of the slots before, the newest last: inputs that are on their way to be freed."""
        self._handed_over: deque[list[Extent]] = deque()
        """Of the slots before, the newest last: gradients on their way to the optimizer."""
        self._turn = 0

    def run(self, plan: ExecutionPlan, iterations: int) -> None:
        """Walk through the slots in the order of their dispatch."""
        starts = {stage.start for stage in plan.forward} | {stage.start for stage in plan.backward}
        rereads = {stage.start for stage in plan.backward}
        for _ in range(iterations):
            for number, stage in enumerate([*plan.forward, *plan.backward]):
                arena = self.arenas[self._turn % len(self.arenas)]
                self._turn += 1
                if number < len(plan.forward):
                    inner = [position for position in range(stage.start + 1, stage.stop + 1) if position in starts]
                    for _ in range(self._num_microbatches):
                        for position in inner:
                            self._put("act", position, arena, self._costs[position].input_bytes)
                    done = [] if stage.start in rereads else [("act", stage.start)]
                else:
                    nbytes = self._costs[stage.start].gradient_bytes
                    for _ in range(self._num_microbatches if stage.start > 0 and nbytes else 0):
                        self._put("agrad", stage.start, arena, nbytes)
                    self._handed_over.append(self._gradients(stage, arena))
                    done = [("act", stage.start), ("agrad", stage.stop)]
                self._committed.append([extent for key in done for extent in self._alive.pop(key, [])])
                late = self._timing.slots if len(self.arenas) > 1 else 0
                while len(self._committed) > late:
                    for extent in self._committed.popleft():
                        self._activations -= align(extent.nbytes)
                        self._free(extent)
                while len(self._handed_over) > self._timing.slots:
                    for extent in self._handed_over.popleft():
                        self._free(extent)

    def _put(self, what: str, position: int, arena: PaperArena, nbytes: int) -> None:
        self._alive.setdefault((what, position), []).append(arena.allocate(nbytes))
        self._activations += align(nbytes)
        self.most_activations = max(self.most_activations, self._activations)

    def _gradients(self, stage: range, arena: PaperArena) -> list[Extent]:
        """Of a slot, deepest layer first; they stay until the optimizer has taken them."""
        return [arena.allocate(gradient_layout(unit)[1], GRADIENTS) for unit in _trained(self._layout, stage)]

    def _free(self, extent: Extent) -> None:
        next(arena for arena in self.arenas if arena.owner == extent.owner).free(extent)
