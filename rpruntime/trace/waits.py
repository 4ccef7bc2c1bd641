"""Why a device did not compute: each gap before a micro-batch, named after what came last of what it needed.

weights    its stage's weights were on their way to the device
input      another stage's result for it was not there; the span says whose
optimizer  the step that its weights come from was not done
work       nothing of the above came within the gap: no task, or the host was busy (launching, messages)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rpruntime.trace.spans import COMPUTE, OPTIMIZER, WAITS, TraceSpan

SHORTEST_MS = 0.02
"""Shorter gaps are between two launches."""


def waits(spans: Iterable[TraceSpan], devices: Iterable[str]) -> list[TraceSpan]:
    """A span on the stream "waits" for each gap between two computations of a device."""
    by_role: dict[str, list[TraceSpan]] = defaultdict(list)
    arrivals: dict[int, list[TraceSpan]] = defaultdict(list)
    activations: dict[tuple[int, int, int], TraceSpan] = {}
    gradients: dict[tuple[int, int], list[TraceSpan]] = defaultdict(list)
    steps: list[TraceSpan] = []
    for span in spans:
        if span.stream == COMPUTE:
            by_role[span.role].append(span)
            if span.name == "backward":
                gradients[span.call, span.microbatch].append(span)
            elif span.name in ("forward", "evaluation"):
                activations.setdefault((span.call, span.microbatch, span.layers[1]), span)
        elif span.stream == "weights up":
            arrivals[span.slot].append(span)
        elif span.stream == OPTIMIZER:
            steps.append(span)
    found = []
    for role in devices:
        rows = sorted(by_role[role], key=lambda span: (span.start_ms, span.end_ms))
        until = rows[0].start_ms if rows else 0.0
        for span in rows:
            if span.start_ms - until > SHORTEST_MS:
                made = []
                if span.kind == "backward":  # what it reads was made just before, of the deeper layers' gradients
                    made = [p for p in gradients[span.call, span.microbatch] if p.end_ms <= span.start_ms]
                elif (first := activations.get((span.call, span.microbatch, span.layers[0]))) is not None:
                    made = [first]
                copies = arrivals.get(span.slot, [])
                found.append(_wait(span, until, copies, [p for p in made if p.slot != span.slot], steps))
            until = max(until, span.end_ms)
    return found


def _wait(
    span: TraceSpan, since: float, weights: list[TraceSpan], made: list[TraceSpan], steps: list[TraceSpan]
) -> TraceSpan:
    causes = [(copy.end_ms, "weights") for copy in weights]
    causes += [(p.end_ms, f"input from {p.role}, layers {p.layers[0]} to {p.layers[1] - 1}") for p in made]
    within = [cause for cause in causes if since < cause[0] <= span.start_ms]
    if within:
        name = max(within)[1]
    elif _is_stepping(steps, since, span.start_ms):
        name = "optimizer"
    else:
        name = "work"
    return TraceSpan(
        span.role,
        WAITS,
        f"waits for {name}",
        since,
        span.start_ms,
        model=span.model,
        iteration=span.iteration,
        call=span.call,
        slot=span.slot,
        kind=span.kind,
        layers=span.layers,
        microbatch=span.microbatch,
    )


def _is_stepping(steps: list[TraceSpan], since: float, until: float) -> bool:
    return any(since < step.end_ms and step.start_ms < until for step in steps if step.name != "G_cp")
