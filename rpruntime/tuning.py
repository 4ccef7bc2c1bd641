"""`plan="auto"`: one layer a stage while the layers are timed, then the computed plan (paper section 4.4).

A stage that was out of memory makes the limit for stages smaller, and the next iteration has a plan under it.
Pure: fed with the spans that workers report, asked for the next iteration's plan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rpruntime.errors import ConfigError
from rpruntime.schedule import formula_plan, partition, simulate
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.limits import gib

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
NUM_SAMPLES = 25
"""Micro-batches whose times of a layer count."""
MEMORY_FRACTION = 0.9
SHRINK = 0.8
"""After a device was out of memory, a stage may need this part of what the plan's largest one was thought to need."""

_ADVICE = "more and so smaller micro-batches (num_microbatches) or shorter sequences help"

Span = tuple[str, int, int, int, float, float]
"""(phase, first layer, layer after the last, micro-batch, start, end); see `SlotCommittedMsg`."""


class _Recent:
    """The median of the newest samples: one micro-batch that waited for memory says nothing about a layer."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, sample: float) -> None:
        self._samples.append(sample)

    @property
    def count(self) -> int:
        return len(self._samples)

    @property
    def value(self) -> float:
        """0 without samples."""
        return median(self._samples) if self._samples else 0.0


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
    peak_bytes: int = 0
    """The most that a slot under this plan has needed on its device."""
    news: str = ""
    """One line about the last change of plan, until it is read."""

    def __post_init__(self) -> None:
        self.plan = self.fixed or ExecutionPlan.one_layer_a_stage(self.num_layers)
        self._forward = [_Recent() for _ in range(self.num_layers)]
        self._backward = [_Recent() for _ in range(self.num_layers)]
        self._alone = [_Recent() for _ in range(self.num_layers)]
        """Backward of layers that were a stage of their own."""
        self._peak = [0] * self.num_layers
        self._num_changes = 0
        self._next_look = 1 + MEASURED_ITERATIONS
        self._failed: list[range] = []
        """Stages that were out of memory since the last iteration began."""
        self._too_large: list[range] = []
        """Layers that no stage may hold together."""
        self._reduced: int | None = None
        """Bytes for one stage since a device was out of memory."""
        self._told: list[range] = []
        """Stages of which the user knows that they cannot be made smaller."""

    @property
    def forward_ms(self) -> list[float]:
        """Forward of each layer and micro-batch; the loss counts as the last layer's."""
        return [recent.value for recent in self._forward]

    @property
    def backward_ms(self) -> list[float]:
        """Recompute and backward of each layer and micro-batch."""
        return [f.value + b.value for f, b in zip(self._forward, self._backward, strict=True)]

    def observe(self, spans: Iterable[Span], peak_bytes: int) -> None:
        """Take in what a slot took."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if self.fixed is not None:
            return
        loss = 0.0
        backward: set[int] = set()
        for phase, start, stop, _, began, ended in spans:
            taken = ended - began
            if phase == "loss":
                loss = taken
            elif phase in ("forward", "recompute"):
                self._forward[start].add(taken)
            elif phase == "backward":
                backward.update(range(start, stop))
                if stop == start + 1:
                    self._alone[start].add(taken)
                share = self._shares(start, stop)
                for layer in range(start, stop):
                    extra = loss if layer == self.num_layers - 1 else 0.0
                    self._backward[layer].add(taken * share[layer - start] + extra)
        if len(backward) == 1:  # of a stage that ran layer by layer, the peak is no layer's own
            (layer,) = backward
            self._peak[layer] = max(self._peak[layer], peak_bytes)

    def out_of_memory(self, stage: range) -> None:
        """Take in that a slot over these layers did not fit on its device, also with caches freed.

        The next `before_iteration` chooses a plan without such stages, whatever it costs in time; `news` has the line.
        """
        if self.fixed is None and stage not in self._failed:
            self._failed.append(stage)

    def _shares(self, start: int, stop: int) -> list[float]:
        """How a stage's backward divides over its layers: as they were when each was timed alone."""
        known = [self._alone[layer].value or self._backward[layer].value or 1e-9 for layer in range(start, stop)]
        return [value / sum(known) for value in known]

    def before_iteration(self, iteration: int, num_microbatches: int, *, asynchronous: bool) -> ExecutionPlan:
        """The plan of the next iteration."""
        if self._failed:
            self._make_smaller(iteration, num_microbatches, asynchronous=asynchronous)
        elif self.fixed is None and iteration >= self._next_look and all(recent.count for recent in self._backward):
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
        self.plan, self.peak_bytes = found, 0
        self._num_changes += 1
        text = f"layers measured: now {_stages(found)}, {_ms(then)} ms an iteration expected (was {_ms(now)})"
        if self._num_changes <= NUM_ANNOUNCED:
            self._tell(text)
        else:
            log.info("%s", text)

    def _best(self, num_microbatches: int, *, asynchronous: bool) -> ExecutionPlan | None:
        """The best plan by the times so far that leaves no device without a stage."""
        limit = self._limit()
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
        found = self._without_too_large(found)
        return found if found.num_stages >= fewest else None

    def _limit(self) -> int | None:
        """Bytes for one stage; None: nothing is known."""
        if not any(self._peak):
            return None
        limits = [int(self.memory_bytes * MEMORY_FRACTION), self._reduced or 0]
        return min((limit for limit in limits if limit), default=None)

    def _make_smaller(self, iteration: int, num_microbatches: int, *, asynchronous: bool) -> None:
        """Choose a plan in which no stage holds what failed."""
        failed, self._failed = self._failed, []
        together = [layers for stage in failed for layers in _not_together(stage, self.num_layers)]
        self._too_large += [layers for layers in together if layers not in self._too_large]
        stages = [*self.plan.forward, *self.plan.backward]
        if not any(_holds(stage, layers) for stage in stages for layers in together):
            # one layer a stage; or an iteration that was under way when the plan changed failed as the one before it
            stuck = [stage for stage in failed if stage in stages and stage not in self._told]
            self._told += stuck
            if stuck:
                self._tell(f"{_out_of_memory(stuck)}: no smaller stage is possible, so the plan stays; {_ADVICE}")
            return
        if any(self._peak):
            heaviest = max(sum(self._peak[layer] for layer in stage) for stage in stages)
            reduced = max(int(SHRINK * heaviest), *self._peak)
            self._reduced = min(reduced, self._reduced or reduced)
        self.plan = self._best(num_microbatches, asynchronous=asynchronous) or self._without_too_large(self.plan)
        self.peak_bytes = 0
        self._num_changes += 1
        self._next_look = iteration + REPLAN_INTERVAL
        limit = self._limit()
        self._tell(
            f"{_out_of_memory(failed)}: now {_stages(self.plan)}" + (f" of at most {gib(limit)}" if limit else "")
        )

    def _tell(self, text: str) -> None:
        log.info("%s", text)
        self.news = text

    def _without_too_large(self, plan: ExecutionPlan) -> ExecutionPlan:
        for layers in self._too_large:
            plan = _split(plan, layers)
        return plan

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


def _out_of_memory(stages: list[range]) -> str:
    names = [f"layers {s.start} to {s.stop - 1}" if len(s) > 1 else f"layer {s.start}" for s in stages]
    return f"out of device memory in {' and in '.join(names)}"


def _holds(stage: range, layers: range) -> bool:
    return stage.start <= layers.start and layers.stop <= stage.stop


def _not_together(failed: range, num_layers: int) -> list[range]:
    """Layers that no stage may hold together after these failed; what failed alone stays alone."""
    if len(failed) > 1:
        return [failed]
    (layer,) = failed
    return [range(start, start + 2) for start in (layer - 1, layer) if start >= 0 and start + 2 <= num_layers]


def _split(plan: ExecutionPlan, layers: range) -> ExecutionPlan:
    """The plan with every stage that holds these layers cut in their middle."""
    middle = layers.start + len(layers) // 2

    def cut(stage: range) -> list[range]:
        return [range(stage.start, middle), range(middle, stage.stop)] if _holds(stage, layers) else [stage]

    forward = [part for stage in plan.forward for part in cut(stage)]
    fused, *backward = [part for stage in plan.backward for part in reversed(cut(stage))]
    if fused.start > plan.backward[0].start:  # the fused stage is shorter, so forward goes on to where it begins
        forward.append(range(plan.backward[0].start, fused.start))
    return ExecutionPlan(forward, [fused, *backward], plan.round_size)


def _stages(plan: ExecutionPlan) -> str:
    """What a plan is, in words."""
    if plan.num_stages == 1:
        return "1 stage (all layers fused)"
    return f"{plan.num_stages} stages ({len(plan.forward)} forward, {len(plan.backward)} backward)"
