"""`plan="auto"`: one layer a stage while the layers are timed, then the computed plan (paper section 4.4).

Pure: fed with the spans that workers report, asked for the next iteration's plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rpruntime.errors import ConfigError
from rpruntime.schedule import formula_plan, partition, simulate
from rpruntime.schedule.plan import ExecutionPlan

log = logging.getLogger(__name__)

MEASURED_ITERATIONS = 3
"""Iterations that are timed before the first computed plan, after one to warm up."""
REPLAN_INTERVAL = 25
MIN_GAIN = 0.03
"""The plan changes only for an iteration that is shorter by this fraction in simulation."""
MIN_LATER_GAIN = 0.08
"""The same once it has changed: every change makes processes reserve memory of other sizes."""
NUM_ANNOUNCED = 2
"""Changes that are told to the user; later ones are only logged."""
SMOOTHING = 0.2
MEMORY_FRACTION = 0.9

Span = tuple[str, int, int, int, float, float]
"""(phase, first layer, layer after the last, micro-batch, start, end); see `SlotCommittedMsg`."""


@dataclass
class _Average:
    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        weight = max(SMOOTHING, 1 / self.count)
        self.value += weight * (sample - self.value)


@dataclass
class Tuner:
    """Times a model's layers and chooses plans.

    Args:
        num_layers: of the model.
        num_devices: workers in the rotation.
        memory_bytes: of the smallest device; 0: no limit is known.
        fixed: a plan that the user chose; then nothing changes.
    """

    num_layers: int
    num_devices: int
    memory_bytes: int = 0
    fixed: ExecutionPlan | None = None
    plan: ExecutionPlan = field(init=False)
    news: str = ""
    """One line about the last change of plan, until it is read."""

    def __post_init__(self) -> None:
        self.plan = self.fixed or ExecutionPlan.one_layer_a_stage(self.num_layers)
        self._forward = [_Average() for _ in range(self.num_layers)]
        self._backward = [_Average() for _ in range(self.num_layers)]
        self._peak = [0] * self.num_layers
        self._num_changes = 0
        self._next_look = 1 + MEASURED_ITERATIONS

    @property
    def forward_ms(self) -> list[float]:
        """Forward of each layer and micro-batch; the loss counts as the last layer's."""
        return [average.value for average in self._forward]

    @property
    def backward_ms(self) -> list[float]:
        """Recompute and backward of each layer and micro-batch."""
        return [f.value + b.value for f, b in zip(self._forward, self._backward, strict=True)]

    def observe(self, spans: Iterable[Span], peak_bytes: int) -> None:
        """Take in what a slot took."""
        if self.fixed is not None:
            return
        loss = 0.0
        for phase, start, stop, _, began, ended in spans:
            taken = ended - began
            if phase == "loss":
                loss = taken
            elif phase in ("forward", "recompute"):
                self._forward[start].add(taken)
            elif phase == "backward":
                share = self._shares(start, stop)
                for layer in range(start, stop):
                    extra = loss if layer == self.num_layers - 1 else 0.0
                    self._backward[layer].add(taken * share[layer - start] + extra)
                if stop - start == 1:
                    self._peak[start] = max(self._peak[start], peak_bytes)

    def _shares(self, start: int, stop: int) -> list[float]:
        """How a stage's backward divides over its layers: as they were when each was timed alone."""
        known = [self._backward[layer].value or 1e-9 for layer in range(start, stop)]
        return [value / sum(known) for value in known]

    def before_iteration(self, iteration: int, num_microbatches: int, *, asynchronous: bool) -> ExecutionPlan:
        """The plan of the next iteration."""
        if self.fixed is None and iteration >= self._next_look and all(average.count for average in self._backward):
            self._next_look = iteration + REPLAN_INTERVAL
            self._look(num_microbatches, asynchronous=asynchronous)
        return self.plan

    def _look(self, num_microbatches: int, *, asynchronous: bool) -> None:
        found = self._best(num_microbatches, asynchronous=asynchronous)
        if found is None or found == self.plan:
            return
        now, then = (self._expected_ms(plan, num_microbatches, asynchronous) for plan in (self.plan, found))
        if then >= now * (1 - (MIN_LATER_GAIN if self._num_changes else MIN_GAIN)):
            return
        self.plan = found
        self._num_changes += 1
        text = (
            f"layers measured: now {found.num_stages} stages ({len(found.forward)} forward, {len(found.backward)} "
            f"backward), {_ms(then)} ms an iteration expected (was {_ms(now)})"
        )
        log.info("%s", text)
        if self._num_changes <= NUM_ANNOUNCED:
            self.news = text

    def _best(self, num_microbatches: int, *, asynchronous: bool) -> ExecutionPlan | None:
        """The best plan by the times so far that leaves no device without a stage."""
        limit = int(self.memory_bytes * MEMORY_FRACTION) if self.memory_bytes and any(self._peak) else None
        sizes = self._peak if limit else None
        fewest = min(self.num_devices, 2 * self.num_layers - 1)
        settings: dict[str, Any] = {
            "num_devices": self.num_devices,
            "num_microbatches": num_microbatches,
            "forward_bytes": sizes,
            "backward_bytes": sizes,
            "memory_limit": limit,
        }
        try:
            found = partition(self.forward_ms, self.backward_ms, asynchronous=asynchronous, **settings)
            if found.num_stages < fewest:
                found = formula_plan(self.forward_ms, self.backward_ms, **settings)
        except ConfigError:
            return None  # one layer a stage runs, so no other plan is needed
        return found if found.num_stages >= fewest else None

    def _expected_ms(self, plan: ExecutionPlan, num_microbatches: int, asynchronous: bool) -> float:
        """Milliseconds of an iteration in simulation."""
        iterations = 4 if asynchronous else 1
        result = simulate(
            plan,
            self.forward_ms,
            self.backward_ms,
            num_devices=self.num_devices,
            num_microbatches=num_microbatches,
            asynchronous=asynchronous,
            iterations=iterations,
        )
        return result.makespan_ms / iterations


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
