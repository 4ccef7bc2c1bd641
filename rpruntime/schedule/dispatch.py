"""The dispatch sequence: which stage goes to which device, in which order (paper section 3.2, round-robin dispatch)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rpruntime.errors import ConfigError
from rpruntime.schedule.plan import ExecutionPlan

KINDS = ("forward", "fused", "backward", "infer")
_SLOT = re.compile(r"t(\d+) (\w+) (\d+)-(\d+) mb (\d+)-(\d+) dev (\d+)")


@dataclass(frozen=True)
class Slot:
    """One place in the sequence; prints as `t0 forward 0-2 mb 0-15 dev 3` (first and last, both included).

    `kind` is "forward", "fused", "backward" or "infer"; `layers` ascending; `iteration` is the `t` of the text.
    """

    kind: str
    layers: range
    microbatches: range
    device: int
    iteration: int = 0

    def __str__(self) -> str:
        layers, microbatches = self.layers, self.microbatches
        return (
            f"t{self.iteration} {self.kind} {layers.start}-{layers.stop - 1} "
            f"mb {microbatches.start}-{microbatches.stop - 1} dev {self.device}"
        )

    @classmethod
    def parse(cls, text: str) -> Slot:
        """The slot that prints as `text`.

        Raises:
            ConfigError: no slot prints so.
        """
        found = _SLOT.fullmatch(text.strip())
        if found is None or found[2] not in KINDS:
            raise ConfigError(f"not a slot: {text.strip()!r}; one looks like 't0 forward 0-2 mb 0-15 dev 3'")
        iteration, first, last, first_mb, last_mb, device = (int(found[group]) for group in (1, 3, 4, 5, 6, 7))
        if last < first or last_mb < first_mb:
            raise ConfigError(f"not a slot: {text.strip()!r} ends before it begins")
        return cls(found[2], range(first, last + 1), range(first_mb, last_mb + 1), device, iteration)


def dispatch_call(
    plan: ExecutionPlan, num_microbatches: int, num_devices: int, first_device: int = 0, iteration: int = 0
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
            slots.append(Slot(kind, layers, microbatches, (first_device + len(slots)) % num_devices, iteration))
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
