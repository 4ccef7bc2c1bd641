"""The schedules: RoundPipe, and the four that it is compared with, whose stages are bound to devices.

A bound schedule needs a plan whose stages are the same forward and backward. Stage s of S = v * N is on device
s mod N. Where such a schedule hands over single micro-batches (1F1B), a slot holds one; where a stage runs all of
them (GPipe, looped BFS), a slot holds all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpruntime.errors import ConfigError
from rpruntime.schedule.dispatch import Slot, dispatch_call
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.schedule.sequence import DispatchSequence

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "roundpipe")
Op = tuple[str, int, int]
"""("forward" or "backward", stage, micro-batch); micro-batch -1 stands for all of them."""


def build(
    schedule: str,
    plan: ExecutionPlan,
    *,
    num_devices: int,
    num_microbatches: int,
    iterations: int = 1,
    asynchronous: bool = False,
    first_device: int = 0,
) -> DispatchSequence:
    """The dispatch sequence of a schedule.

    Args:
        schedule: one of `SCHEDULES`.
        plan: RoundPipe takes any; the others one whose forward and backward stages are the same (`bound_plan`),
            N of them for "gpipe" and "1f1b", a multiple of N for "interleaved" and "looped_bfs".
        first_device: where RoundPipe's first slot goes.

    Raises:
        ConfigError: the schedule cannot be built so; the message says what it needs.
    """
    counts = {"num_devices": num_devices, "num_microbatches": num_microbatches, "iterations": iterations}
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number from 1 on, not {value!r}")
    slots: list[Slot] = []
    if schedule == "roundpipe":
        for iteration in range(iterations):
            device = (first_device + len(slots)) % num_devices
            slots += dispatch_call(plan, num_microbatches, num_devices, device, iteration)
    elif schedule in _ORDERS:
        stages = _bound_stages(schedule, plan, num_devices)
        orders = _ORDERS[schedule](len(stages), num_devices, num_microbatches)
        for iteration in range(iterations):
            slots += _merge(orders, stages, num_devices, num_microbatches, iteration)
    else:
        raise ConfigError(f"there is no schedule {schedule!r}, only {', '.join(SCHEDULES)}")
    return DispatchSequence(
        schedule, plan.num_layers, num_devices, num_microbatches, tuple(slots), iterations, asynchronous
    )


def _bound_stages(schedule: str, plan: ExecutionPlan, num_devices: int) -> list[range]:
    stages = [*plan.forward, plan.backward[0]]
    if stages != list(reversed(plan.backward)):
        raise ConfigError(f"{schedule} needs the same stages forward and backward; rp.schedule.bound_plan makes such")
    if schedule in ("gpipe", "1f1b") and len(stages) != num_devices:
        raise ConfigError(f"{schedule} needs one stage a device, {num_devices}, not {len(stages)}")
    if len(stages) % num_devices:
        raise ConfigError(f"{schedule} needs a multiple of {num_devices} stages, not {len(stages)}")
    return stages


def _all_forward_all_backward(num_stages: int, num_devices: int, num_microbatches: int) -> list[list[Op]]:
    """GPipe; with several stages a device, looped BFS."""
    orders: list[list[Op]] = []
    for device in range(num_devices):
        mine = range(device, num_stages, num_devices)
        forward: list[Op] = [("forward", stage, -1) for stage in mine]
        backward: list[Op] = [("backward", stage, -1) for stage in reversed(mine)]
        orders.append(forward + backward)
    return orders


def _interleaved(num_stages: int, num_devices: int, num_microbatches: int) -> list[list[Op]]:
    """1F1B; with v > 1 stages a device, interleaved 1F1B as in Megatron-LM (groups of N micro-batches)."""
    chunks = num_stages // num_devices
    if chunks > 1 and num_microbatches % num_devices:
        raise ConfigError(
            f"interleaved needs a multiple of {num_devices} micro-batches (one a device), not {num_microbatches}"
        )
    orders: list[list[Op]] = []
    for device in range(num_devices):
        warm_up = num_devices - device - 1
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * num_devices
        total = chunks * num_microbatches
        warm_up = min(warm_up, total)
        turns = [
            (chunk, microbatch)
            for first in range(0, num_microbatches, num_devices)
            for chunk in range(chunks)
            for microbatch in range(first, min(first + num_devices, num_microbatches))
        ]
        forward: list[Op] = [("forward", chunk * num_devices + device, m) for chunk, m in turns]
        backward: list[Op] = [("backward", (chunks - 1 - chunk) * num_devices + device, m) for chunk, m in turns]
        steady = [op for pair in zip(forward[warm_up:], backward[: total - warm_up], strict=True) for op in pair]
        orders.append(forward[:warm_up] + steady + backward[total - warm_up :])
    return orders


_ORDERS: dict[str, Callable[[int, int, int], list[list[Op]]]] = {
    "gpipe": _all_forward_all_backward,
    "looped_bfs": _all_forward_all_backward,
    "1f1b": _interleaved,
    "interleaved": _interleaved,
}


def _merge(
    orders: Sequence[Sequence[Op]], stages: Sequence[range], num_devices: int, num_microbatches: int, iteration: int
) -> list[Slot]:
    """One order of all devices' slots in which each comes after what it reads."""
    done: set[Op] = set()
    slots: list[Slot] = []
    position = [0] * num_devices
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while position[device] < len(order):
                kind, stage, microbatch = op = order[position[device]]
                if kind == "forward":
                    before: Op | None = ("forward", stage - 1, microbatch) if stage else None
                elif stage == len(stages) - 1:
                    before = ("forward", stage, microbatch)
                else:
                    before = ("backward", stage + 1, microbatch)
                if before is not None and before not in done:
                    break
                done.add(op)
                microbatches = range(num_microbatches) if microbatch < 0 else range(microbatch, microbatch + 1)
                slots.append(Slot(kind, stages[stage], microbatches, device, iteration))
                position[device] += 1
                moved = True
    assert all(place == len(order) for place, order in zip(position, orders, strict=True)), "the orders deadlock"
    return slots
