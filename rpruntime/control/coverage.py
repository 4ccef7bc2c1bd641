"""Which tasks of a call may come next, when they are submitted one by one, and what nobody is known to read yet.

Every micro-batch passes the layers upwards (forward tasks, then the fused one), then down again (backward tasks). What
a task reads is made by itself or by tasks that were submitted before: so slots, numbered as they are submitted, are in
an order in which they can run, and devices that take theirs by number cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rpruntime.errors import ConfigError
from rpruntime.wire.messages import Key

KINDS = ("forward", "fused", "backward")


@dataclass(frozen=True)
class TaskOrder:
    """A task as it was submitted; prints as `forward 0-2 mb 0-7 dev worker-1` (first and last, both included).

    `role`: the worker, or "": whose turn it is. `after`: slots whose commits it waits for, besides its data.
    """

    kind: str
    layers: range
    microbatches: tuple[int, ...]
    role: str = ""
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" dev {self.role}" if self.role else ""
        layers = f"{self.layers.start}-{self.layers.stop - 1}"
        return f"{self.kind} {layers} mb {spelled(self.microbatches)}{where}"


def spelled(numbers: Sequence[int]) -> str:
    """`0-3,6` for (0, 1, 2, 3, 6)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class Coverage:
    """How far the tasks submitted so far take each micro-batch of a call.

    Args:
        num_layers: of the model.
        active: of each micro-batch, whether it has a backward (one of weight 0 has none).
        buffered: layers whose buffers pass from micro-batch to micro-batch.

    Attributes:
        forward: of each micro-batch, the layers below this one have their forward.
        backward: of each micro-batch, the layers from this one on have their backward.
    """

    def __init__(self, num_layers: int, active: Sequence[bool], buffered: frozenset[int]) -> None:
        self.num_layers = num_layers
        self.active = tuple(active)
        self.buffered = buffered
        self.forward = [0] * len(active)
        self.backward = [num_layers] * len(active)

    def copy(self) -> Coverage:
        """Another one, as far as this."""
        other = Coverage(self.num_layers, self.active, self.buffered)
        other.forward, other.backward = list(self.forward), list(self.backward)
        return other

    @property
    def is_complete(self) -> bool:
        """Whether every layer has its forward and its backward, for each micro-batch."""
        return all(layer == 0 for layer in self.backward)

    def missing(self) -> str:
        """What is still to be submitted, in words; empty: nothing."""
        last = self.num_layers - 1
        for m, (up, down) in enumerate(zip(self.forward, self.backward, strict=True)):
            if up < self.num_layers:
                return f"micro-batch {m} lacks the forward of layers {up} to {last}"
            if down > 0:
                return f"micro-batch {m} lacks the backward of layers 0 to {down - 1}"
        return ""

    def add(self, order: TaskOrder) -> None:
        """Count a task in.

        Raises:
            ConfigError: it may not come next; names the task and why. Nothing has changed.
        """
        problem = self._problem(order)
        if problem:
            raise ConfigError(f"task {order}: {problem}")
        for m in order.microbatches:
            if order.kind == "forward":
                self.forward[m] = order.layers.stop
            elif order.kind == "fused":
                self.forward[m], self.backward[m] = self.num_layers, order.layers.start
            else:
                self.backward[m] = order.layers.start

    def _problem(self, order: TaskOrder) -> str:
        layers, last = order.layers, self.num_layers - 1
        if order.kind not in KINDS:
            return f"the kind must be one of {', '.join(KINDS)}"
        if layers.step != 1 or not layers:
            return "layers must be a range of consecutive layers, such as range(0, 3)"
        if layers.start < 0 or layers.stop > self.num_layers:
            return f"the model has layers 0 to {last}"
        if not order.microbatches:
            return "it has no micro-batch"
        if list(order.microbatches) != sorted(set(order.microbatches)):
            return "micro-batches must ascend, each once"
        if order.microbatches[0] < 0 or order.microbatches[-1] >= len(self.active):
            return f"the call has micro-batches 0 to {len(self.active) - 1}"
        if order.kind == "forward" and layers.stop == self.num_layers:
            return f"layer {last}, the last one, runs in a fused task, with the loss and its backward"
        if order.kind == "fused" and layers.stop < self.num_layers:
            return f"a fused task ends with layer {last}, the last one"
        check = self._backward_problem if order.kind == "backward" else self._forward_problem
        return next((problem for m in order.microbatches if (problem := check(order, m))), "")

    def _forward_problem(self, order: TaskOrder, m: int) -> str:
        layers, done = order.layers, self.forward[m]
        if done > layers.start:
            return f"layer {layers.start} has its forward for micro-batch {m} already"
        if done < layers.start:
            return f"the forward of layer {done} for micro-batch {m} comes before it: submit that first"
        if m > 0 and m - 1 not in order.microbatches:
            for position in layers:
                if position in self.buffered and self.forward[m - 1] <= position:
                    return (
                        f"layer {position} has buffers, which pass from micro-batch to micro-batch: submit its forward "
                        f"for micro-batch {m - 1} first"
                    )
        return ""

    def _backward_problem(self, order: TaskOrder, m: int) -> str:
        layers, done = order.layers, self.backward[m]
        if self.forward[m] < self.num_layers:
            return f"the fused task of micro-batch {m} comes before it: submit that first"
        if done < layers.stop:
            return f"layer {layers.stop - 1} has its backward for micro-batch {m} already"
        if done > layers.stop:
            return f"the backward of layer {done - 1} for micro-batch {m} comes before it: submit that first"
        return ""

    def is_known(self, m: int, position: int) -> bool:
        """Whether all tasks have come that read the input of a layer, or the buffers before it, for a micro-batch."""
        return self.forward[m] > position and (self.backward[m] <= position or not self.active[m])

    def unread(self, call: int, m: int, buffers_from: tuple[int, int], *, has_label: bool) -> set[Key]:
        """Keys that are there, or will be, and that a task yet to come may read for a micro-batch."""
        top = min(self.forward[m], self.num_layers - 1)
        keys: set[Key] = {("act", call, m, p) for p in range(top + 1) if not self.is_known(m, p)}
        if has_label and self.forward[m] < self.num_layers:
            keys.add(("label", call, m))
        if self.active[m] and 0 < self.backward[m] < self.num_layers:
            keys.add(("agrad", call, m, self.backward[m]))
        for p in self.buffered:
            if not self.is_known(m, p):
                if m == 0:
                    keys.add(("buffer", *buffers_from, p))
                elif self.forward[m - 1] > p:
                    keys.add(("buffer", call, m - 1, p))
        return keys

    def touched(self, orders: Iterable[TaskOrder]) -> list[int]:
        """Micro-batches whose `unread` these tasks change."""
        found = {n for order in orders for m in order.microbatches for n in (m, m + 1)}
        return sorted(n for n in found if n < len(self.active))
