"""Plans by simulation: candidates near the paper's objective, in order of a lower bound, until none can be better."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from rpruntime.schedule.costs import LayerTimes
from rpruntime.schedule.packing import Cut, Packer

_MAX_OPERATIONS = 4_000_000
"""Simulated micro-batches over all candidates: a bound on the time of a search that leaves it deterministic."""
_FEW_LAYERS = 5
"""Up to here every cut is a candidate."""
_MAX_SHAPES = 500
_MAX_SWEEPS = 4
_STARTS = 8
"""Cuts from which boundaries are moved."""
_WARM_UP_TURNS, _MEASURED_TURNS = 8, 16
"""Slots of a device until asynchronous iterations follow each other evenly, and those then timed."""


class Score:
    """How long an iteration takes under a cut: RoundPipe, one round, first-in first-out devices."""

    def __init__(
        self, times: LayerTimes, num_devices: int, num_microbatches: int, hop_ms: float, asynchronous: bool = False
    ) -> None:
        self.times = times
        self.num_devices = num_devices
        self.num_microbatches = num_microbatches
        self._hop_ms = hop_ms if num_devices > 1 else 0.0
        self.asynchronous = asynchronous
        self.operations = 0

    def bound(self, stage_ms: Sequence[float]) -> float:
        """No iteration under these stages is shorter (asynchronous: nearly none).

        Synchronous: a device begins with its first slot at the earliest when one micro-batch has come that far,
        works off its slots, and one micro-batch still has to go from its last slot to the end. Asynchronous: the
        work shared evenly, plus a share of what the slowest stage makes the others wait.
        """
        count, devices, microbatches = len(stage_ms), self.num_devices, self.num_microbatches
        if self.asynchronous:
            return microbatches * (0.75 * sum(stage_ms) + 0.25 * count * max(stage_ms)) / devices
        way = list(accumulate((ms + self._hop_ms for ms in stage_ms), initial=0.0))
        longest = way[-1] - self._hop_ms + (microbatches - 1) * max(stage_ms)
        for device in range(min(devices, count)):
            last = device + (count - 1 - device) // devices * devices
            rest = max(0.0, way[-1] - way[last + 1] - self._hop_ms) + (self._hop_ms if last + 1 < count else 0.0)
            longest = max(longest, way[device] + microbatches * sum(stage_ms[device::devices]) + rest)
        return longest

    def exact(self, stage_ms: Sequence[float]) -> float:
        """The simulated time of an iteration; asynchronous: from one to the next, once the pipeline is full."""
        if not self.asynchronous:
            return self._ends(stage_ms, 1)[-1]
        count = len(stage_ms)
        warm_up = max(2, -(-_WARM_UP_TURNS * self.num_devices // count))
        period = self.num_devices // math.gcd(self.num_devices, count)  # iterations until devices repeat
        measured = period * max(1, _MEASURED_TURNS * self.num_devices // (count * period))
        ends = self._ends(stage_ms, warm_up + measured)
        return (ends[-1] - ends[-1 - measured]) / measured

    def _ends(self, stage_ms: Sequence[float], iterations: int) -> list[float]:
        """When each iteration ends. Slots come in dispatch order, so that one pass over them is enough."""
        free = [0.0] * self.num_devices
        hop, devices, count = self._hop_ms, self.num_devices, self.num_microbatches
        ends: list[float] = []
        slot = 0
        self.operations += iterations * len(stage_ms) * count
        for iteration in range(iterations):
            open_at = ends[iteration - 2] if iteration >= 2 else 0.0
            arrivals = [open_at] * count
            for ms in stage_ms:
                device = slot % devices
                now = free[device]
                slot += 1
                for microbatch, arrival in enumerate(arrivals):
                    now = (arrival if arrival > now else now) + ms
                    arrivals[microbatch] = now + hop
                free[device] = now
            ends.append(arrivals[-1] - hop)
        return ends


def search(packer: Packer, formula: Cut, score: Score) -> Cut:
    """The cut that simulates shortest; on equal times the one with fewer stages, then the first found.

    Candidates (of a few layers, all cuts) are simulated in the order of their lower bounds, until no bound is below
    the times of the best few. From each of those, single boundaries are moved as long as that helps.
    """
    times = packer.times
    if packer.num_layers <= _FEW_LAYERS:
        cuts = dict.fromkeys(cut for cut in _every(packer.num_layers) if packer.fits(cut))
    else:
        cuts = dict.fromkeys([formula, *_packed(packer, formula), *_shaped(packer, score)])
    queue = [(score.bound(cut.stage_ms(times)), cut.num_stages, number, cut) for number, cut in enumerate(cuts)]
    queue.sort(key=lambda entry: entry[:3])
    best = [(score.exact(formula.stage_ms(times)), formula.num_stages, -1, formula)]
    starts = 2 if score.asynchronous else _STARTS
    for bound, num_stages, number, cut in queue:
        if score.operations > _MAX_OPERATIONS * 0.7:
            break
        if len(best) == starts and bound >= best[-1][0] and not score.asynchronous:
            break
        if cut != formula:
            insort(best, (score.exact(cut.stage_ms(times)), num_stages, number, cut), key=lambda entry: entry[:3])
            del best[starts:]
    climbed = [_climb(packer, score, cut, found_ms) for found_ms, _, _, cut in best]
    return min(climbed, key=lambda entry: (entry[0] * (1 - 1e-9), entry[1].num_stages))[1]


def _climb(packer: Packer, score: Score, best: Cut, best_ms: float) -> tuple[float, Cut]:
    for _ in range(_MAX_SWEEPS):
        before = best_ms
        for move in range(2 * (len(best.forward) + len(best.backward))):
            cut = _moved(best, move)
            if cut is None or not packer.fits(cut):
                continue
            if score.operations > _MAX_OPERATIONS:
                return best_ms, best
            stage_ms = cut.stage_ms(packer.times)
            if score.bound(stage_ms) < best_ms or score.asynchronous:
                found_ms = score.exact(stage_ms)
                if found_ms < best_ms * (1 - 1e-9):
                    best, best_ms = cut, found_ms
        if best_ms == before:
            break
    return best_ms, best


def _every(num_layers: int) -> Iterator[Cut]:
    for fused in range(num_layers):
        inner = [places for count in range(max(1, fused)) for places in combinations(range(1, fused), count)]
        ways = [(0, *places, fused) if fused else (0,) for places in inner]
        for forward in ways:
            for backward in ways:
                yield Cut(forward, (num_layers, *reversed(backward)))


def _packed(packer: Packer, formula: Cut) -> Iterator[Cut]:
    """Greedy packings as the formula's, for a rising t_max, with the fused stage full and one or two layers less."""
    shortest, highest = max(packer.times.backward_ms), 2 * max(formula.stage_ms(packer.times))
    steps = 40
    for step in range(steps + 1):
        t_max = shortest * (highest / shortest) ** (step / steps) if shortest else highest
        brim = packer.fused_start(t_max)
        for fused in range(brim, min(brim + 2, packer.max_fused) + 1):
            forward, backward = packer.pack_forward(fused, t_max), packer.pack_backward(fused, t_max)
            if forward is not None and backward is not None:
                yield Cut(forward, (packer.num_layers, *backward))


def _shaped(packer: Packer, score: Score) -> Iterator[Cut]:
    """Even cuts into the numbers of forward and backward stages that promise most."""
    times = packer.times
    shapes: list[tuple[float, int, int, int]] = []
    latest = packer.max_fused
    limit = 2 * max(times.backward_ms)
    for fused in range(latest, max(packer.min_fused, latest - 8) - 1, -1):
        if fused < latest and times.backward_sum[-1] - times.backward_sum[fused] > limit:
            break
        for num_backward in range(min(1, fused), fused + 1):
            share = times.backward_sum[fused] / max(1, num_backward)
            around = round(times.forward_sum[fused] / share) if share else fused
            first = max(min(1, fused), around - 2)
            for num_forward in range(first, min(around + score.num_devices, fused) + 1):
                promise = _promise(times, score, fused, num_forward, num_backward)
                shapes.append((promise, fused, num_forward, num_backward))
    forward_cuts: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    backward_cuts: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for _, fused, num_forward, num_backward in sorted(shapes)[:_MAX_SHAPES]:
        if (fused, num_forward) not in forward_cuts:
            forward_cuts[fused, num_forward] = _cuts_into(times.forward_sum, fused, num_forward)
        if (fused, num_backward) not in backward_cuts:
            backward_cuts[fused, num_backward] = _cuts_into(times.backward_sum, fused, num_backward)
        for forward in forward_cuts[fused, num_forward]:
            for backward in backward_cuts[fused, num_backward]:
                cut = Cut(forward, (packer.num_layers, *reversed(backward)))
                if packer.fits(cut):
                    yield cut


def _promise(times: LayerTimes, score: Score, fused: int, num_forward: int, num_backward: int) -> float:
    """About the time of an iteration if stages were as even as can be: the device with most slots, and its start."""
    count, devices, microbatches = num_forward + num_backward + 1, score.num_devices, score.num_microbatches
    work = times.forward_sum[fused] + times.backward_sum[-1]
    longest = max(
        times.backward_sum[-1] - times.backward_sum[fused],
        times.forward_sum[fused] / num_forward if num_forward else 0.0,
        times.backward_sum[fused] / num_backward if num_backward else 0.0,
    )
    if score.asynchronous:
        return microbatches * (work + count * longest) / devices
    share = work / count
    most = -(-count // devices) * microbatches * share + (count - 1) % devices * share
    return max(most, work + (microbatches - 1) * longest)


def _cuts_into(sums: Sequence[float], stop: int, count: int) -> list[tuple[int, ...]]:
    """Cuts of [0, stop) into `count` runs of about equal time: even, shorter runs first, shorter runs last."""
    if count == 0:
        return [(0,)]
    bounds = [0]
    for index in range(1, count):
        target = sums[stop] * index / count
        place = bisect_left(sums, target, bounds[-1] + 1, stop)
        if place > bounds[-1] + 1 and target - sums[place - 1] <= sums[place] - target:
            place -= 1
        bounds.append(min(max(place, bounds[-1] + 1), stop - (count - index)))
    bounds.append(stop)
    sizes = sorted(second - first for first, second in pairwise(bounds))
    shorter_first = tuple(accumulate(sizes, initial=0))
    shorter_last = tuple(accumulate(reversed(sizes), initial=0))
    return list(dict.fromkeys([tuple(bounds), shorter_first, shorter_last]))


def _moved(cut: Cut, move: int) -> Cut | None:
    """The cut with one boundary moved by one layer; None: there is no such move, or it empties a stage."""
    step = 1 if move % 2 else -1
    index = move // 2
    forward, backward = list(cut.forward), list(cut.backward)
    if index < len(forward) - 1:
        if index == 0:  # where the fused stage starts
            forward[-1] += step
            backward[1] += step
        else:
            forward[index] += step
    else:
        index -= len(forward) - 3  # backward[0] is L, backward[1] where the fused stage starts
        if not 2 <= index < len(backward) - 1:
            return None
        backward[index] += step
    ascending = all(first < second for first, second in pairwise(forward))
    descending = all(first > second for first, second in pairwise(backward))
    if not ascending or not descending or forward[0] != 0 or backward[-1] != 0:
        return None
    return Cut(tuple(forward), tuple(backward))
