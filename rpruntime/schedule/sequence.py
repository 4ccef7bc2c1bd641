"""Dispatch sequences of all schedules as one kind of data: a header and slots, a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rpruntime.errors import ConfigError
from rpruntime.schedule.dispatch import Slot

_HEADER = re.compile(r"(\S+) (sync|async) layers (\d+) devices (\d+) microbatches (\d+) iterations (\d+)")


@dataclass(frozen=True)
class DispatchSequence:
    """Slots in an order in which every slot comes after what it reads.

    Each device runs its slots in this order, and a slot's micro-batches in theirs. Synchronous: an iteration
    begins when the one before has ended. Asynchronous: when the one before that has ended (staleness 1).
    """

    schedule: str
    num_layers: int
    num_devices: int
    num_microbatches: int
    slots: tuple[Slot, ...]
    iterations: int = 1
    asynchronous: bool = False

    def __str__(self) -> str:
        mode = "async" if self.asynchronous else "sync"
        header = (
            f"{self.schedule} {mode} layers {self.num_layers} devices {self.num_devices} "
            f"microbatches {self.num_microbatches} iterations {self.iterations}"
        )
        return "\n".join([header, *map(str, self.slots)])

    @classmethod
    def parse(cls, text: str) -> DispatchSequence:
        """The sequence that prints as `text`; blank lines are skipped.

        Raises:
            ConfigError: a line is not what it should be.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        header = _HEADER.fullmatch(lines[0].strip()) if lines else None
        if header is None:
            raise ConfigError("a sequence begins with a line such as 'gpipe sync layers 4 devices 2 ...'")
        layers, devices, microbatches, iterations = (int(header[group]) for group in (3, 4, 5, 6))
        slots = tuple(Slot.parse(line) for line in lines[1:])
        return cls(header[1], layers, devices, microbatches, slots, iterations, header[2] == "async")

    def of_device(self, device: int) -> list[Slot]:
        """The slots of one device, in the order in which it runs them."""
        return [slot for slot in self.slots if slot.device == device]


def check_sequence(
    sequence: DispatchSequence,
    *,
    forward_bytes: list[float] | None = None,
    backward_bytes: list[float] | None = None,
    memory_limit: float | None = None,
) -> None:
    """Raises ConfigError, naming the slot, unless the sequence trains each micro-batch exactly once, in order.

    Checked: devices, layers and micro-batches exist; in each iteration every layer runs forward once and backward
    once for every micro-batch; a slot comes after what it reads; iterations come one after the other; with
    `memory_limit` (bytes), the layers of a slot fit together.
    """
    progress: dict[tuple[int, int], _Progress] = {}
    iteration = 0
    for slot in sequence.slots:
        _check_ranges(slot, sequence, iteration)
        iteration = slot.iteration
        if memory_limit is not None:
            sizes = forward_bytes if slot.kind in ("forward", "infer") else backward_bytes
            needed = sum(sizes[layer] for layer in slot.layers) if sizes is not None else 0
            if needed > memory_limit:
                raise ConfigError(f"slot '{slot}' needs {needed:.0f} bytes, the limit is {memory_limit:.0f}")
        for microbatch in slot.microbatches:
            of_microbatch = progress.setdefault((iteration, microbatch), _Progress(sequence.num_layers))
            of_microbatch.advance(slot, microbatch)
    for iteration in range(sequence.iterations):
        for microbatch in range(sequence.num_microbatches):
            found = progress.get((iteration, microbatch))
            if found is None:
                raise ConfigError(f"iteration {iteration}: micro-batch {microbatch} is in no slot")
            found.check_complete(iteration, microbatch)


def _check_ranges(slot: Slot, sequence: DispatchSequence, iteration: int) -> None:
    if not 0 <= slot.device < sequence.num_devices:
        raise ConfigError(f"slot '{slot}': there are {sequence.num_devices} devices")
    if not slot.layers or slot.layers.start < 0 or slot.layers.stop > sequence.num_layers:
        raise ConfigError(f"slot '{slot}': there are {sequence.num_layers} layers")
    if not slot.microbatches or slot.microbatches.start < 0 or slot.microbatches.stop > sequence.num_microbatches:
        raise ConfigError(f"slot '{slot}': there are {sequence.num_microbatches} micro-batches")
    if not iteration <= slot.iteration < sequence.iterations:
        raise ConfigError(f"slot '{slot}': iterations ascend and there are {sequence.iterations}")


class _Progress:
    """How far one micro-batch has come in one iteration."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._forward = 0  # layers below have run forward
        self._backward = num_layers  # layers from here on have run backward

    def advance(self, slot: Slot, microbatch: int) -> None:
        layers = slot.layers
        if slot.kind in ("forward", "fused"):
            if layers.start < self._forward:
                raise ConfigError(f"slot '{slot}': forward of layer {layers.start} again, micro-batch {microbatch}")
            if layers.start > self._forward:
                raise ConfigError(f"slot '{slot}' comes before layer {self._forward} of micro-batch {microbatch}")
            self._forward = layers.stop
        if slot.kind == "fused" and layers.stop != self._num_layers:
            raise ConfigError(f"slot '{slot}': a fused stage ends at the last layer, {self._num_layers - 1}")
        if slot.kind in ("backward", "fused"):
            if self._forward < self._num_layers:
                raise ConfigError(f"slot '{slot}' comes before the forward pass of micro-batch {microbatch} has ended")
            if layers.stop > self._backward:
                raise ConfigError(f"slot '{slot}': backward of layer {layers.stop - 1} again, micro-batch {microbatch}")
            if layers.stop < self._backward:
                raise ConfigError(
                    f"slot '{slot}' comes before the backward of layer {self._backward - 1}, micro-batch {microbatch}"
                )
            self._backward = layers.start
        if slot.kind not in ("forward", "fused", "backward"):
            raise ConfigError(f"slot '{slot}': {slot.kind} is no part of training")

    def check_complete(self, iteration: int, microbatch: int) -> None:
        where = f"iteration {iteration}, micro-batch {microbatch}"
        if self._forward < self._num_layers:
            raise ConfigError(f"{where}: layer {self._forward} never runs forward")
        if self._backward > 0:
            raise ConfigError(f"{where}: layer {self._backward - 1} never runs backward")
