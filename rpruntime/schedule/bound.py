"""Stages of the bound schedules: the same forward and backward, a multiple of the number of devices."""

from __future__ import annotations

from collections.abc import Sequence

from rpruntime.errors import ConfigError
from rpruntime.schedule.costs import LayerTimes
from rpruntime.schedule.plan import ExecutionPlan


def bound_plan(forward_ms: Sequence[float], backward_ms: Sequence[float], num_stages: int) -> ExecutionPlan:
    """The plan with `num_stages` equal forward and backward stages whose longest (both passes) is shortest.

    Of the plans that are as good in that, the one whose later stages are the fuller ones. `backward_ms` includes the
    recomputation; the last layer, which bound schedules do not recompute, counts without it.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    times = LayerTimes.of(forward_ms, backward_ms)
    count = times.num_layers
    if not 1 <= num_stages <= count:
        raise ConfigError(f"{count} layers cannot be cut into {num_stages} stages")
    costs = [f + b for f, b in zip(times.forward_ms, times.backward_ms, strict=True)]
    costs[-1] -= min(times.forward_ms[-1], times.backward_ms[-1])
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        if _stages_needed(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle
    starts = _pack_from_end(costs, high, num_stages)
    return mirrored_plan([range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)])


def mirrored_plan(stages: Sequence[range]) -> ExecutionPlan:
    """The plan with these stages, ascending, both forward and backward."""
    return ExecutionPlan(stages[:-1], list(reversed(stages)))


def _stages_needed(costs: Sequence[float], limit: float) -> int:
    count, room = 1, limit
    for cost in costs:
        if cost > room:
            count, room = count + 1, limit
        room -= cost
    return count


def _pack_from_end(costs: Sequence[float], limit: float, num_stages: int) -> list[int]:
    """First layers of the stages; each takes what fits, but leaves a layer for each stage before it."""
    limit *= 1 + 1e-9
    starts: list[int] = []
    stop = len(costs)
    for before in reversed(range(num_stages)):
        start, room = stop, limit
        while start > before and (start == stop or costs[start - 1] <= room) and (before or start > 0):
            start -= 1
            room -= costs[start]
        starts.append(start)
        stop = start
    starts.reverse()
    assert starts[0] == 0, "more stages are needed than counted"
    return starts
