"""Schedules as data: plans and dispatch sequences. Pure Python, no torch, no ZeroMQ."""

from rpruntime.schedule.plan import ExecutionPlan

__all__ = ["ExecutionPlan"]
