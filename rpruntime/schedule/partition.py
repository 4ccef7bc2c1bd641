"""Cutting layers into stages by the paper's objective (section 4.4), and better, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

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

    The number of stages falls as t_max rises. So between two candidates for t_max nothing can be better than the
    stages of the longer with the time of the shorter, and a range in which that is too much is left out; other ranges
    are halved. Objectives are at least M * (all backward passes) + N(N-1) * t_max, which bounds the candidates.
    """
    times = packer.times
    min_stages = min(num_devices, 2 * packer.max_fused + 1)
    fixed = num_devices * (num_devices - 1)
    best, best_t = inf, 0.0

    def evaluate(t_max: float) -> float:
        """The fewest stages."""
        nonlocal best, best_t
        stages = _greedy(packer, t_max, min_stages)
        if stages is None:
            return inf
        num_stages = max(stages.num_stages, min_stages)
        value = (num_microbatches * num_stages + fixed) * t_max
        if value < best * (1 - 1e-9):
            best, best_t = value, t_max
        return num_stages

    shortest = max(times.backward_ms)  # each layer is in some backward stage or in the fused one
    evaluate(max(times.forward_sum[-1] + times.backward_sum[-1], 1e-9))
    if best == inf:
        raise ConfigError(f"no plan of {packer.num_layers} layers fits the memory limit")
    for step in range(12):
        evaluate(max(shortest, 1e-9) * 1.2**step)
    longest = best / (num_microbatches * min_stages + fixed)
    if fixed:
        longest = min(longest, (best - num_microbatches * times.backward_sum[-1]) / fixed)
    candidates = _candidates(times, shortest, longest * (1 + 1e-9))
    if candidates:
        ranges = [(0, len(candidates) - 1, evaluate(candidates[0]), evaluate(candidates[-1]))]
        while ranges:
            first, last, at_first, at_last = ranges.pop()
            nothing_less = (num_microbatches * at_last + fixed) * candidates[first] * (1 + 1e-12) >= best
            if last - first < 2 or at_first == at_last < inf or nothing_less:
                continue
            middle = (first + last) // 2
            at_middle = evaluate(candidates[middle])
            ranges += [(middle, last, at_middle, at_last), (first, middle, at_first, at_middle)]
    cut = _greedy(packer, best_t, min_stages)
    assert cut is not None
    while cut.num_stages < min_stages:
        cut = _halve_longest(cut, times)
    return cut


def _greedy(packer: Packer, t_max: float, min_stages: int) -> Cut | None:
    """The fewest stages under t_max that can be split into `min_stages`; None: some layer takes longer."""
    fused = max(packer.fused_start(t_max), min_stages // 2)
    if fused > packer.max_fused:
        return None
    forward, backward = packer.pack_forward(fused, t_max), packer.pack_backward(fused, t_max)
    if forward is None or backward is None:
        return None
    return Cut(forward, (packer.num_layers, *backward))


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
