"""Schedules as data: plans, dispatch sequences, partition and simulator. Pure Python, no torch, no ZeroMQ."""

from rpruntime.schedule.bound import bound_plan
from rpruntime.schedule.dispatch import Slot
from rpruntime.schedule.engine import DeadlockError, Span
from rpruntime.schedule.generators import SCHEDULES, build
from rpruntime.schedule.partition import formula_plan, partition
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.schedule.sequence import DispatchSequence, check_sequence
from rpruntime.schedule.simulation import Simulation, simulate, simulate_sequence

__all__ = [
    "SCHEDULES",
    "DeadlockError",
    "DispatchSequence",
    "ExecutionPlan",
    "Simulation",
    "Slot",
    "Span",
    "bound_plan",
    "build",
    "check_sequence",
    "formula_plan",
    "partition",
    "simulate",
    "simulate_sequence",
]
