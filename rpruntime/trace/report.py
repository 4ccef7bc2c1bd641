"""The bubbles of a real run in the simulator's four categories, beside its prediction for the same plan and times.

Of each model, the iterations with its last plan that the trace holds whole. Synchronous: each from its first start to
its last end, and the mean of all; what lies between two of them (the optimizer's step, mostly) is told apart.
Asynchronous: iterations overlap, so from the end of the first to the end of the last but one, where there are as many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.schedule.engine import Span
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.schedule.simulation import Simulation, account, simulate
from rpruntime.trace.chrome import TraceData
from rpruntime.trace.spans import COMPUTE, TraceSpan

CATEGORIES = ("fill", "switch", "intra", "drain")


@dataclass(frozen=True)
class Bubbles:
    """Milliseconds of an iteration, and fractions of it times the devices."""

    iteration_ms: float
    busy: float
    fill: float
    switch: float
    intra: float
    drain: float


@dataclass(frozen=True)
class Report:
    """Of one model: `real` and `predicted`, over `iterations`; `between_ms`: from one iteration's end to the next."""

    model: str
    iterations: tuple[int, ...]
    plan: ExecutionPlan
    num_microbatches: int
    real: Bubbles
    predicted: Bubbles | None
    between_ms: float | None

    def lines(self) -> list[str]:
        """For the terminal."""
        first, last = self.iterations[0], self.iterations[-1]
        steps = f"step {first}" if first == last else f"{len(self.iterations)} steps, {first} to {last}"
        rows = [
            f"trace of {self.model}: {steps}; {len(self.plan.forward)} forward + {len(self.plan.backward)} backward "
            f"stages, {self.num_microbatches} micro-batches",
            f"  {'':12}{'iteration':>12}{'computing':>11}" + "".join(f"{name:>9}" for name in CATEGORIES),
        ]
        for name, found in (("this run", self.real), ("simulated", self.predicted)):
            if found is not None:
                shares = [found.busy, *(getattr(found, category) for category in CATEGORIES)]
                cells = f"{shares[0]:>11.1%}" + "".join(f"{share:>9.1%}" for share in shares[1:])
                rows.append(f"  {name:12}{_ms(found.iteration_ms):>12}{cells}")
        if self.between_ms is not None:
            rows.append(f"  between two iterations (mostly the optimizer): {_ms(self.between_ms)}")
        return rows


def reports(data: TraceData) -> list[Report]:
    """One for each model of which the trace holds a whole iteration."""
    by_model: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in data.spans:
        if span.stream == COMPUTE and span.iteration >= 0 and span.role in data.devices:
            by_model[span.model].append(span)
    found = []
    for number, spans in sorted(by_model.items()):
        model = data.models.get(number, {})
        report = _report(str(model.get("name", number)), bool(model.get("asynchronous")), spans, list(data.devices))
        if report is not None:
            found.append(report)
    return found


def _report(name: str, asynchronous: bool, spans: list[TraceSpan], roles: list[str]) -> Report | None:
    whole: dict[int, tuple[ExecutionPlan, int]] = {}
    by_iteration: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        by_iteration[span.iteration].append(span)
    for iteration, theirs in by_iteration.items():
        found = _plan(theirs)
        if found is not None:
            whole[iteration] = found
    if not whole:
        return None
    last = max(whole)
    chosen = [last]
    while chosen[0] - 1 in whole and whole[chosen[0] - 1] == whole[last]:
        chosen.insert(0, chosen[0] - 1)
    plan, count = whole[last]
    ours = [span for iteration in chosen for span in by_iteration[iteration]]
    spans_of = {iteration: _as_spans(by_iteration[iteration], roles) for iteration in chosen}
    if asynchronous:
        real = _overlapping(_as_spans(ours, roles), len(roles))
        between = None
    else:
        accounts = [account(_shifted(row, row[0].start_ms), len(roles)) for row in map(_separate, spans_of.values())]
        real = _mean(accounts)
        gaps = [
            spans_of[after][0].start_ms - max(span.end_ms for span in spans_of[before])
            for before, after in pairwise(chosen)
        ]
        between = sum(gaps) / len(gaps) if gaps else None
    predicted = _predict(plan, ours, len(roles), count, asynchronous, len(chosen))
    return Report(name, tuple(chosen), plan, count, real, predicted, between)


def _plan(spans: list[TraceSpan]) -> tuple[ExecutionPlan, int] | None:
    """An iteration's stages and its number of micro-batches; None: the trace does not hold all of it."""
    slots: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        slots[span.slot].append(span)
    stages: dict[tuple[str, int, int], set[tuple[int, int]]] = defaultdict(set)
    """(kind, first layer, layer after the last) -> (call, micro-batch)"""
    size = 0
    for rows in slots.values():
        ends = [layer for span in rows for layer in span.layers]
        found = {(span.call, span.microbatch) for span in rows}
        stages[rows[0].kind, min(ends), max(ends)] |= found
        size = max(size, len(found))
    counts = {frozenset(found) for found in stages.values()}
    if len(counts) != 1:
        return None

    def ranges(kind: str) -> list[range]:
        return [range(start, stop) for found, start, stop in sorted(stages) if found == kind]

    count = len(counts.pop())
    deepest_first = [*ranges("fused"), *reversed(ranges("backward"))]
    try:
        return ExecutionPlan(ranges("forward"), deepest_first, size if size < count else None), count
    except ConfigError:
        return None


def _as_spans(spans: Sequence[TraceSpan], roles: list[str]) -> list[Span]:
    devices = {role: index for index, role in enumerate(roles)}
    found = [
        Span(devices[s.role], s.kind, range(*s.layers), s.microbatch, s.iteration, s.start_ms, s.end_ms) for s in spans
    ]
    return sorted(found, key=lambda span: (span.start_ms, span.end_ms))


def _separate(spans: list[Span]) -> list[Span]:
    """All in one iteration, as `account` begins each where the one before has ended."""
    return [Span(s.device, s.kind, s.layers, s.microbatch, 0, s.start_ms, s.end_ms) for s in spans]


def _overlapping(spans: Sequence[Span], num_devices: int) -> Bubbles:
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.iteration] = max(ends.get(span.iteration, 0.0), span.end_ms)
    order = [ends[iteration] for iteration in sorted(ends)]
    if len(order) < 3:
        begin = min(span.start_ms for span in spans)
        found = account(_shifted(spans, begin), num_devices, asynchronous=True)
        return _bubbles(found, found.makespan_ms / len(order))
    found = _clipped_account(spans, num_devices, order[0], order[-2])
    return _bubbles(found, found.makespan_ms / (len(order) - 2))


def _shifted(spans: Iterable[Span], by_ms: float) -> list[Span]:
    """Spans earlier by so much."""
    return [
        Span(s.device, s.kind, s.layers, s.microbatch, s.iteration, s.start_ms - by_ms, s.end_ms - by_ms) for s in spans
    ]


def _clipped_account(spans: Iterable[Span], num_devices: int, begin: float, end: float) -> Simulation:
    """What lies in a window of a run whose iterations overlap: idle time at its edges is neither fill nor drain."""
    inside = [
        Span(s.device, s.kind, s.layers, s.microbatch, s.iteration, max(s.start_ms, begin), min(s.end_ms, end))
        for s in spans
        if s.end_ms > begin and s.start_ms < end
    ]
    edge = Span(0, "infer", range(0), -1, 0, end, end)  # no work: the window goes up to here
    found = account([*_shifted([*inside, edge], begin)], num_devices, asynchronous=True)
    return Simulation(
        num_devices=num_devices,
        makespan_ms=found.makespan_ms,
        busy_ms=found.busy_ms,
        fill=0.0,
        switch=found.switch,
        intra=found.fill + found.intra + found.drain,
        drain=0.0,
        spans=found.spans[:-1],
    )


def _mean(accounts: list[Simulation]) -> Bubbles:
    total = sum(found.makespan_ms for found in accounts) or 1.0
    shares = {
        name: sum(getattr(found, name) * found.makespan_ms for found in accounts) / total
        for name in (*CATEGORIES, "bubble")
    }
    bubble = shares.pop("bubble")
    return Bubbles(total / len(accounts), 1.0 - bubble, **shares)


def _bubbles(found: Simulation, iteration_ms: float) -> Bubbles:
    return Bubbles(iteration_ms, 1.0 - found.bubble, found.fill, found.switch, found.intra, found.drain)


def _predict(
    plan: ExecutionPlan,
    spans: list[TraceSpan],
    num_devices: int,
    num_microbatches: int,
    asynchronous: bool,
    iterations: int,
) -> Bubbles | None:
    forward_ms, backward_ms = layer_times(plan, spans)
    try:
        found = simulate(
            plan,
            forward_ms,
            backward_ms,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            asynchronous=asynchronous,
            iterations=iterations if asynchronous else 1,
        )
    except RoundPipeError:
        return None
    if asynchronous:
        return _overlapping(found.spans, num_devices)
    return _bubbles(found, found.makespan_ms)


def layer_times(plan: ExecutionPlan, spans: Sequence[TraceSpan]) -> tuple[list[float], list[float]]:
    """(forward, backward) milliseconds a layer and micro-batch, such that stages take what they took.

    A stage's backward is one span over its layers: it is shared out in proportion to what their forward took.
    """
    num_layers = plan.num_layers
    forward: dict[int, list[float]] = defaultdict(list)
    again: dict[int, list[float]] = defaultdict(list)
    backward: dict[tuple[int, int], list[float]] = defaultdict(list)
    loss: list[float] = []
    for span in spans:
        took = span.end_ms - span.start_ms
        if span.name == "backward":
            backward[span.layers].append(took)
        elif span.name == "loss":
            loss.append(took)
        elif span.kind == "forward":
            forward[span.layers[0]].append(took)
        else:  # the forward within a fused or backward stage
            again[span.layers[0]].append(took)
    forward_ms = [_average(forward.get(layer) or again.get(layer, [])) for layer in range(num_layers)]
    backward_ms = [_average(again.get(layer, [])) for layer in range(num_layers)]
    for (start, stop), taken in backward.items():
        known = [forward_ms[layer] or 1e-9 for layer in range(start, stop)]
        for layer, share in zip(range(start, stop), known, strict=True):
            backward_ms[layer] += _average(taken) * share / sum(known)
    backward_ms[-1] += _average(loss)
    return forward_ms, backward_ms


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
