"""What a simulated schedule took, and where devices were idle (the paper's figure 19)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from rpruntime.errors import ConfigError
from rpruntime.schedule.costs import LayerTimes, numbers
from rpruntime.schedule.dispatch import Slot
from rpruntime.schedule.engine import Engine, Limits, Span
from rpruntime.schedule.generators import build
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.schedule.sequence import DispatchSequence


@dataclass(frozen=True)
class Simulation:
    """Times in milliseconds; the rest are fractions of makespan x devices, and `bubble` is the sum of the last four.

    Attributes:
        busy_ms: sum over devices.
        fill: idle before a device's first work of an iteration that nothing overlaps.
        switch: idle between the last forward before the first backward, and that backward.
        drain: idle after a device's last work of such an iteration.
        intra: the rest; also what lies between overlapping iterations.
        spans: compute, in order of start; `uploads`: of weights, if a link was given.
    """

    num_devices: int
    makespan_ms: float
    busy_ms: float
    fill: float
    switch: float
    intra: float
    drain: float
    spans: tuple[Span, ...]
    uploads: tuple[Span, ...] = ()

    @property
    def bubble(self) -> float:
        """Idle fraction of makespan x devices."""
        total = self.makespan_ms * self.num_devices
        return 1.0 - self.busy_ms / total if total > 0 else 0.0


def simulate(
    plan: ExecutionPlan,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    *,
    num_devices: int,
    num_microbatches: int,
    schedule: str = "roundpipe",
    asynchronous: bool = False,
    iterations: int = 1,
    hop_ms: float = 0.0,
    param_bytes: Sequence[float] | None = None,
    link_gb_per_s: float | None = None,
) -> Simulation:
    """Run a schedule on paper (paper section 5.8.1).

    Args:
        forward_ms, backward_ms: per layer and micro-batch; backward includes the recomputation.
        schedule: one of `generators.SCHEDULES`; the bound ones need the same stages forward and backward.
        asynchronous: iteration t begins when t - 2 has ended; else when t - 1 has.
        hop_ms: from the end of a stage's micro-batch to its arrival on another device.
        param_bytes, link_gb_per_s: per layer, and of each device's own link (1e9 bytes per second). With both, a
            slot waits for its weights, two slots' weights fit on a device, and the next upload overlaps compute.

    Raises:
        ConfigError: the numbers or the plan do not fit each other.
        DeadlockError: the schedule gets stuck.
    """
    times = LayerTimes.of(forward_ms, backward_ms)
    plan.check_covers(times.num_layers)
    sequence = build(
        schedule,
        plan,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        iterations=iterations,
        asynchronous=asynchronous,
    )
    return simulate_sequence(sequence, times, hop_ms=hop_ms, param_bytes=param_bytes, link_gb_per_s=link_gb_per_s)


def simulate_sequence(
    sequence: DispatchSequence,
    times: LayerTimes,
    *,
    hop_ms: float = 0.0,
    param_bytes: Sequence[float] | None = None,
    link_gb_per_s: float | None = None,
    limits: Limits | None = None,
) -> Simulation:
    """`simulate` for any dispatch sequence; slots keep the order of the sequence on each device."""
    (hop_ms,) = numbers("hop_ms", [hop_ms])
    upload_ms: Callable[[Slot], float] | None = None
    if (param_bytes is None) != (link_gb_per_s is None):
        raise ConfigError("param_bytes and link_gb_per_s go together: give both or neither")
    if param_bytes is not None and link_gb_per_s is not None:
        if not link_gb_per_s > 0:
            raise ConfigError(f"link_gb_per_s must be above 0, not {link_gb_per_s}")
        sizes = numbers("param_bytes", param_bytes, times.num_layers)
        upload_ms = partial(_upload_ms, sizes, link_gb_per_s * 1e6)
    slot_ms = {slot: times.slot_ms(slot) for slot in sequence.slots}
    engine = Engine(sequence, lambda slot, _: slot_ms[slot], hop_ms=hop_ms, upload_ms=upload_ms, limits=limits)
    engine.run()
    return account(engine.spans, sequence.num_devices, sequence.asynchronous, engine.uploads)


def _upload_ms(sizes: Sequence[float], bytes_per_ms: float, slot: Slot) -> float:
    return sum(sizes[layer] for layer in slot.layers) / bytes_per_ms


def account(
    spans: Sequence[Span], num_devices: int, asynchronous: bool = False, uploads: Sequence[Span] = ()
) -> Simulation:
    """Sort the idle time of finished spans into fill, switch, intra and drain."""
    makespan = max((span.end_ms for span in spans), default=0.0)
    ends: dict[int, float] = {}
    for span in spans:
        group = 0 if asynchronous else span.iteration
        ends[group] = max(ends.get(group, 0.0), span.end_ms)
    idle = {"fill": 0.0, "switch": 0.0, "intra": 0.0, "drain": 0.0}
    work: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.end_ms > span.start_ms:
            work.setdefault((span.device, 0 if asynchronous else span.iteration), []).append(span)
    begin = 0.0
    for group in sorted(ends):
        for device in range(num_devices):
            _account_device(work.get((device, group), []), begin, ends[group], idle)
        begin = ends[group]
    total = makespan * num_devices or 1.0
    return Simulation(
        num_devices=num_devices,
        makespan_ms=makespan,
        busy_ms=sum(span.end_ms - span.start_ms for span in spans),
        fill=idle["fill"] / total,
        switch=idle["switch"] / total,
        intra=idle["intra"] / total,
        drain=idle["drain"] / total,
        spans=tuple(spans),
        uploads=tuple(uploads),
    )


def _account_device(spans: list[Span], begin: float, end: float, idle: dict[str, float]) -> None:
    """Idle time of one device between `begin` and `end`."""
    if not spans:
        idle["fill"] += end - begin
        return
    idle["fill"] += spans[0].start_ms - begin
    switched: set[int] = set()
    for before, after in pairwise(spans):
        first_backward = after.kind in ("backward", "fused") and after.iteration not in switched
        switching = first_backward and before.kind == "forward" and before.iteration == after.iteration
        if after.kind in ("backward", "fused"):
            switched.add(after.iteration)
        idle["switch" if switching else "intra"] += after.start_ms - before.end_ms
    idle["drain"] += end - spans[-1].end_ms
