"""The dispatch sequence: which stage goes to which device, in which order (paper section 3.2, round-robin dispatch)."""

from __future__ import annotations

from dataclasses import dataclass

from rpruntime.schedule.plan import ExecutionPlan


@dataclass(frozen=True)
class Slot:
    """One place in the sequence. `kind` is "forward", "fused", "backward" or "infer"; `layers` ascending."""

    kind: str
    layers: range
    microbatches: range
    device: int


def dispatch_call(
    plan: ExecutionPlan, num_microbatches: int, num_devices: int, first_device: int = 0
) -> list[Slot]:
    """Slots of one call in dispatch order.

    Slot i of the concatenated forward-then-backward sequence goes to device `(first_device + i) mod N`, and the
    next round resumes where this one left off. The caller carries on with
    `(first_device + len(slots)) mod num_devices` for the next call or iteration, so that devices never drain.

    The order is a topological order of the data dependencies, so devices that take their slots first-in first-out
    cannot deadlock.
    """
    stages = [("forward", stage) for stage in plan.forward]
    stages += [("fused" if index == 0 else "backward", stage) for index, stage in enumerate(plan.backward)]
    slots: list[Slot] = []
    for microbatches in plan.microbatch_rounds(num_microbatches):
        for kind, layers in stages:
            slots.append(Slot(kind, layers, microbatches, (first_device + len(slots)) % num_devices))
    return slots


def dispatch_inference(
    plan: ExecutionPlan, num_microbatches: int, num_devices: int, first_device: int = 0
) -> list[Slot]:
    """Slots of a forward pass alone: the forward stages and the fused stage's layers, without backward."""
    stages = [*plan.forward, plan.backward[0]]
    slots: list[Slot] = []
    for microbatches in plan.microbatch_rounds(num_microbatches):
        for layers in stages:
            slots.append(Slot("infer", layers, microbatches, (first_device + len(slots)) % num_devices))
    return slots
