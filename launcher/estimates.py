"""Host memory, device memory and times of a run that has not been started, from shapes alone. Used by `rpctl plan`.

Host memory is counted as the processes reserve it: each arena begins with what is known at load
(`rpruntime/loading.py`, the same arithmetic) and grows by the rule of `rpruntime/store/arena.py`. What the workers'
arenas need at most is found by walking through the slots of an iteration in the order of their dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.meta_run import LayerCost
from rpruntime.layout import ModelLayout
from rpruntime.loading import gradient_bytes, host_kinds
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.allocator import align
from rpruntime.store.arena import GROWTH_BYTES, GROWTH_FRACTION
from rpruntime.store.layout import gradient_layout, optimizer_layout

QUEUED_CALLS = 2
"""Batches that lie in host memory together: the running one and the next (more calls of one iteration need more)."""

MESSAGE_BYTES = 64 << 20
"""Weights that the optimizer writes while it waits for a message: small units are stepped faster than it comes."""


@dataclass(frozen=True)
class HostEstimate:
    """Shared memory in bytes. `kinds`: what it is needed for; `arenas`: what each process reserves for that."""

    kinds: dict[str, int]
    arenas: dict[str, int]

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
) -> HostEstimate:
    """What a run with one call a step reserves.

    Args:
        layout: where parameters will live.
        costs: of the layers, for one micro-batch.
        plans: that the run will go through (with `plan="auto"` one layer a stage, then the computed plan).
        states: the optimizer's tensors for each parameter; 0 for none.
    """
    kinds = host_kinds(layout, states, asynchronous)
    reserved = gradient_bytes(layout, asynchronous) // num_devices
    workers = [0] * num_devices
    activations = 0
    for plan in plans:
        for first in range(num_devices):  # any device may have the first slot of an iteration
            needs, between, gradients = slots_memory(layout, costs, plan, num_devices, num_microbatches, first)
            if asynchronous:  # of the iteration before, half is still to be stepped, as `gradient_bytes` has it
                needs = [need + before // 2 for need, before in zip(needs, gradients, strict=True)]
            workers = [max(before, need) for before, need in zip(workers, needs, strict=True)]
            activations = max(activations, between)
    batches = QUEUED_CALLS * num_microbatches * costs[0].input_bytes
    buffers = sum(align(b.nbytes) for layer in layout.layers for b in layer.buffers())
    kinds |= {"boundary activations": activations, "batches and buffers": batches + buffers}
    # asynchronous: while one iteration drains, the next one reads other weights and a step writes the third
    third = sum(unit.nbytes for unit in layout.units if unit.trainable) // 2
    kinds["master copies, freed late"] = third if asynchronous else _freed_late(layout, kinds["second master copy"])
    at_load = sum(kinds[kind] for kind in ("master copy", "second master copy", "optimizer copy", "optimizer state"))
    arenas = {"optimizer": grown(at_load, at_load + kinds["master copies, freed late"])}
    arenas |= {f"worker-{index}": grown(reserved, need) for index, need in enumerate(workers)}
    arenas["controller"] = grown(0, batches + buffers + 1)
    return HostEstimate(kinds, arenas)


def _freed_late(layout: ModelLayout, spare: int) -> int:
    """Old weights whose units have been stepped while the message that frees them is on its way; synchronous."""
    every = sum(unit.nbytes for unit in layout.units if unit.trainable)
    return max(0, min(every, MESSAGE_BYTES) - spare)


def grown(reserved: int, need: int) -> int:
    """Bytes of an arena that began with `reserved` and holds `need` at most."""
    total = reserved
    while total < need:
        total += max(GROWTH_BYTES, total // GROWTH_FRACTION)
    return total


def slots_memory(
    layout: ModelLayout,
    costs: Sequence[LayerCost],
    plan: ExecutionPlan,
    num_devices: int,
    num_microbatches: int,
    first_device: int,
) -> tuple[list[int], int, list[int]]:
    """What one iteration puts into the workers' arenas, in bytes.

    Returns (the most that each holds, the most of activations in all of them, gradients in each at the end).

    Gradients stay until the iteration's end, as if the optimizer came last; what a slot has read goes when the one
    after it has written, as both run at the same time.
    """
    live, peaks = [0] * num_devices, [0] * num_devices
    alive: dict[tuple[str, int], tuple[int, int]] = {}
    """(what, position) -> (device, bytes)."""
    most, freed_later = 0, list[tuple[str, int]]()
    starts = {stage.start for stage in plan.forward} | {stage.start for stage in plan.backward}
    backward_starts = {stage.start for stage in plan.backward}

    def put(what: str, position: int, device: int, nbytes: int) -> None:
        alive[what, position] = (device, nbytes)
        live[device] += nbytes
        peaks[device] = max(peaks[device], live[device])

    def drop(keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            device, nbytes = alive.pop(key, (0, 0))
            live[device] -= nbytes

    for number, stage in enumerate([*plan.forward, *plan.backward]):
        device = (first_device + number) % num_devices
        if number < len(plan.forward):
            for position in range(stage.start + 1, stage.stop + 1):
                if position in starts:
                    put("act", position, device, num_microbatches * costs[position].input_bytes)
            done = [] if stage.start in backward_starts else [("act", stage.start)]
        else:
            if stage.start > 0 and costs[stage.start].gradient_bytes:
                put("agrad", stage.start, device, num_microbatches * costs[stage.start].gradient_bytes)
            gradients = sum(_gradient_bytes(layout, position) for position in stage)
            put("gradients", stage.start, device, gradients)
            done = [("act", stage.start), ("agrad", stage.stop)]
        most = max(most, sum(nbytes for (what, _), (_, nbytes) in alive.items() if what != "gradients"))
        if num_devices == 1:
            drop(done)
        else:
            drop(freed_later)
            freed_later = done
    gradients_of = [0] * num_devices
    for (what, _), (device, nbytes) in alive.items():
        gradients_of[device] += nbytes if what == "gradients" else 0
    return peaks, most, gradients_of


def _gradient_bytes(layout: ModelLayout, position: int) -> int:
    units = (layout.units[unit] for unit in layout.layer_units[position])
    return sum(align(gradient_layout(unit)[1]) for unit in units if unit.trainable)


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
