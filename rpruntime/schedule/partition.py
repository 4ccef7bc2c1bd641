"""Cutting layers into stages by the paper's objective (section 4.4), and better, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from rpruntime.errors import ConfigError
from rpruntime.schedule.costs import LayerTimes, numbers
from rpruntime.schedule.packing import Cut, Packer
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.schedule.search import Score, search


def partition(
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    *,
    num_devices: int,
    num_microbatches: int,
    forward_bytes: Sequence[float] | None = None,
    backward_bytes: Sequence[float] | None = None,
    memory_limit: float | None = None,
    hop_ms: float = 0.0,
    asynchronous: bool = False,
) -> ExecutionPlan:
    """The plan whose simulated iteration is shortest, among those near the paper's objective.

    Args:
        forward_ms, backward_ms: per layer and micro-batch; backward includes the recomputation, which in the fused
            stage is its forward.
        forward_bytes, backward_bytes: what a layer needs on the device in a forward stage, and in a backward or the
            fused one.
        memory_limit: bytes for one stage.
        hop_ms: from the end of a stage's micro-batch to its arrival on another device.
        asynchronous: shorten the time from one iteration to the next, rather than that of one alone.

    Raises:
        ConfigError: the numbers do not fit each other, or a layer fits in no stage (layer, bytes and limit are named).
    """
    times = LayerTimes.of(forward_ms, backward_ms)
    packer = Packer(times, forward_bytes, backward_bytes, memory_limit)
    (hop_ms,) = numbers("hop_ms", [hop_ms])
    _check_counts(num_devices, num_microbatches)
    formula = formula_cut(packer, num_devices, num_microbatches)
    return to_plan(search(packer, formula, Score(times, num_devices, num_microbatches, hop_ms, asynchronous)))


def formula_plan(
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    *,
    num_devices: int,
    num_microbatches: int,
    forward_bytes: Sequence[float] | None = None,
    backward_bytes: Sequence[float] | None = None,
    memory_limit: float | None = None,
) -> ExecutionPlan:
    """The plan that minimises (M * S + N * (N - 1)) * t_max with S >= min(N, 2L - 1) stages (paper section 4.4).

    The lower bound on S keeps every device busy where there are layers enough; it is dropped if memory forbids it.
    Arguments and errors as for `partition`.
    """
    packer = Packer(LayerTimes.of(forward_ms, backward_ms), forward_bytes, backward_bytes, memory_limit)
    _check_counts(num_devices, num_microbatches)
    return to_plan(formula_cut(packer, num_devices, num_microbatches))


def formula_cut(packer: Packer, num_devices: int, num_microbatches: int) -> Cut:
    """The cut of `formula_plan`.

    Candidates for t_max ascend. The objective is at least M * work + N(N-1) * t_max, where work is all backward
    passes: that bounds t_max from the first finds on. A candidate is packed only if the stages that its work needs
    at least, were they all full, would beat the best.
    """
    times, count = packer.times, packer.num_layers
    min_stages = min(num_devices, 2 * packer.max_fused + 1)
    fixed = num_devices * (num_devices - 1)
    all_backward = times.backward_sum[-1]
    best, less = float("inf"), 1 - 2e-9
    found: tuple[float, int] | None = None
    shortest = max(times.backward_ms)  # each layer is in some backward stage or in the fused one

    def evaluate(t_max: float) -> None:
        nonlocal best, found
        fused = max(packer.fused_start(t_max), min_stages // 2)
        if fused > packer.max_fused:
            return
        least = ceil(times.forward_sum[fused] / t_max * less) + ceil(times.backward_sum[fused] / t_max * less) + 1
        if (num_microbatches * max(least, min_stages) + fixed) * t_max >= best:
            return
        forward, backward = packer.pack_forward(fused, t_max), packer.pack_backward(fused, t_max)
        if forward is None or backward is None:
            return
        num_stages = max(len(forward) + len(backward) - 1, min_stages)
        value = (num_microbatches * num_stages + fixed) * t_max
        if value < best * (1 - 1e-9):
            best, found = value, (t_max, fused)

    evaluate(max(times.forward_sum[-1] + all_backward, 1e-9))
    if shortest > 0:  # some lengths first, so that few candidates are left to look at
        for step in range(25):
            evaluate(shortest * 1.1**step)
    longest = best / (num_microbatches * min_stages + fixed)
    if fixed:
        longest = min(longest, (best - num_microbatches * all_backward) / fixed)
    for t_max in _candidates(times, shortest, longest * (1 + 1e-9)):
        evaluate(t_max)
    if found is None:  # memory forbids so many stages' layers outside the fused one
        raise ConfigError(f"no plan of {count} layers fits the memory limit")
    return _split_to(packer, found[0], found[1], min_stages)


def to_plan(cut: Cut) -> ExecutionPlan:
    """The plan with these boundaries."""
    forward = [range(start, stop) for start, stop in pairwise(cut.forward)]
    return ExecutionPlan(forward, [range(start, stop) for stop, start in pairwise(cut.backward)])


def _check_counts(num_devices: int, num_microbatches: int) -> None:
    for name, value in {"num_devices": num_devices, "num_microbatches": num_microbatches}.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number from 1 on, not {value!r}")


def _candidates(times: LayerTimes, shortest: float, longest: float) -> list[float]:
    """Times of all runs of layers between the two, ascending; equal up to rounding counts as one."""
    found: set[float] = set()
    for sums in (times.forward_sum, times.backward_sum):
        for stop in range(1, len(sums)):
            top = sums[stop]
            for start in range(stop - 1, -1, -1):
                length = top - sums[start]
                if length >= shortest and length > 0:
                    if length > longest:
                        break
                    found.add(float(f"{length:.10g}"))
    return sorted(found)


def _split_to(packer: Packer, t_max: float, fused: int, num_stages: int) -> Cut:
    """The greedy stages for t_max, the longest of them halved until there are at least `num_stages`."""
    forward, backward = packer.pack_forward(fused, t_max), packer.pack_backward(fused, t_max)
    assert forward is not None and backward is not None
    cut = Cut(forward, (packer.num_layers, *backward))
    while cut.num_stages < num_stages:
        cut = _halve_longest(cut, packer.times)
    return cut


def _halve_longest(cut: Cut, times: LayerTimes) -> Cut:
    forward, backward = list(cut.forward), list(cut.backward)
    longest: tuple[float, int, int] | None = None
    for which, (bounds, sums) in enumerate(((forward, times.forward_sum), (backward[1:], times.backward_sum))):
        for index, (first, second) in enumerate(pairwise(bounds)):
            length = abs(sums[second] - sums[first])
            if abs(second - first) > 1 and (longest is None or length > longest[0]):
                longest = (length, which, index)
    assert longest is not None, "every stage but the fused one has one layer"
    _, which, index = longest
    if which == 0:
        forward.insert(index + 1, (forward[index] + forward[index + 1]) // 2)
    else:
        backward.insert(index + 2, (backward[index + 1] + backward[index + 2]) // 2)
    return Cut(tuple(forward), tuple(backward))
