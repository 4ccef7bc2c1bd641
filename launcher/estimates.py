"""Host memory, device memory and times of a run that has not been started, from shapes alone. Used by `rpctl plan`.

Host memory is counted as the processes reserve it: each arena begins with what is known at load
(`rpruntime/loading.py`, the same arithmetic), and `launcher/host_walk.py` walks through some iterations to see how
it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.host_walk import LATE, PROMPT, PaperArena, WorkersWalk, walk_optimizer
from launcher.meta_run import LayerCost
from rpruntime.layout import ModelLayout
from rpruntime.loading import host_kinds
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.allocator import align
from rpruntime.store.layout import optimizer_layout

QUEUED_CALLS = 2
"""Batches that lie in host memory together: the running one and the next (more calls of one iteration need more)."""


@dataclass(frozen=True)
class HostEstimate:
    """Shared memory in bytes. `kinds`: what it is needed for at most; `arenas`: what each process reserves for that."""

    kinds: dict[str, int]
    arenas: dict[str, int]
    least: int
    """What is reserved if everything is freed as early as it can be."""
    most: int
    """And if everything is freed as late as it may be."""

    @property
    def total(self) -> int:
        """What the machine has to give."""
        return sum(self.arenas.values())


@dataclass(frozen=True)
class DeviceEstimate:
    """Bytes of one device at its fullest, in the backward of `stage`."""

    stage: range
    weights: int
    sums: int
    activations: int

    @property
    def total(self) -> int:
        """Without the CUDA context and workspaces of libraries (about 0.5 to 1 GiB)."""
        return self.weights + self.sums + self.activations


def host_memory(
    layout: ModelLayout,
    costs: Sequence[LayerCost],
    plans: Sequence[ExecutionPlan],
    *,
    states: int,
    asynchronous: bool,
    num_devices: int,
    num_microbatches: int,
    prepared: bool = True,
) -> HostEstimate:
    """What a run with one call a step reserves.

    Args:
        layout: where parameters will live.
        costs: of the layers, for one micro-batch.
        plans: that the run will go through (with `plan="auto"` one layer a stage, then the computed plan).
        states: the optimizer's tensors for each parameter; 0 for none.
        asynchronous: as RoundPipe's.
        num_devices: workers in the rotation.
        num_microbatches: of a call.
        prepared: whether the optimizer's state has its room at load (`rpruntime.optimizer.pieces.FUSED`).
    """
    kinds = host_kinds(layout, states, asynchronous)
    ways = []
    for timing in (PROMPT, LATE):
        walk = WorkersWalk(layout, costs, num_devices, num_microbatches, timing)
        for plan in plans:
            walk.run(plan, num_devices + 2)  # by then each device has begun an iteration
        ways.append((walk_optimizer(layout, states, prepared, asynchronous, timing, plans), walk))
    buffers = sum(align(b.nbytes) for layer in layout.layers for b in layer.buffers())
    batches = QUEUED_CALLS * num_microbatches * align(costs[0].input_bytes)
    controller = PaperArena("controller")
    controller.allocate(buffers + 1)
    for _ in range(QUEUED_CALLS * num_microbatches):
        controller.allocate(costs[0].input_bytes)
    rows = [(optimizer, *walk.arenas, controller) for optimizer, walk in ways]
    least, most = sorted(sum(arena.total_bytes for arena in row) for row in rows)
    optimizer, walk = ways[-1]
    at_load = sum(
        kinds[kind] for kind in ("master copy", "gradients and next master copy", "optimizer copy", "optimizer state")
    )
    kinds |= {"boundary activations": walk.most_activations, "batches and buffers": batches + buffers}
    sums = sum(optimizer_layout(unit)[1] for unit in layout.units if unit.trainable and len(unit.positions) > 1)
    kinds["sums of shared parameters"] = sums
    kinds["master copies, freed late"] = max(0, optimizer.peak - at_load - sums)
    # the way depends on how fast the optimizer is beside the devices: the middle is off by half at most
    arenas = {one.owner: (one.total_bytes + other.total_bytes) // 2 for one, other in zip(*rows, strict=True)}
    return HostEstimate(kinds, arenas, least, most)


def device_memory(
    layout: ModelLayout, costs: Sequence[LayerCost], plans: Sequence[ExecutionPlan], num_devices: int
) -> DeviceEstimate:
    """The fullest moment of any device: a backward stage with its weights, and those of the slot that comes next."""

    def weights(stage: range) -> int:
        return sum(layout.units[unit].nbytes for unit in {u for p in stage for u in layout.layer_units[p]})

    found: list[DeviceEstimate] = []
    for plan in plans:
        slots = [*plan.forward, *plan.backward]
        for number, stage in enumerate(slots):
            following = slots[(number + num_devices) % len(slots)]
            trains = number >= len(plan.forward)
            sums, kept = 0, max(costs[position].peak_bytes for position in stage)
            if trains:
                units = (layout.units[unit] for position in stage for unit in layout.layer_units[position])
                sums = sum(optimizer_layout(unit)[1] for unit in units if unit.trainable)
                together = sum(costs[position].kept_bytes for position in stage)
                kept = together + max(costs[position].peak_bytes - costs[position].kept_bytes for position in stage)
            next_input = costs[stage.start].input_bytes  # comes up one micro-batch early
            found.append(DeviceEstimate(stage, weights(stage) + weights(following), sums, kept + next_input))
    return max(found, key=lambda estimate: estimate.total)
