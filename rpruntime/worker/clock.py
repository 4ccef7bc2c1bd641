"""When a device reached a mark, on the machine's monotonic clock."""

from __future__ import annotations

from typing import Any

MAX_ELAPSED_MS = 10_000.0
"""CUDA gives the time between two events as a float of 24 bits: to a microsecond after ten seconds, but to a quarter of
a millisecond after an hour, and layers are timed by it."""


class DeviceClock:
    """Counts from an origin that moves along.

    Args:
        origin: an event that the device has reached; `origin.elapsed_time(other)` are the milliseconds to another one.
        origin_ms: the monotonic clock at that moment.
    """

    def __init__(self, origin: Any, origin_ms: float) -> None:
        self._origin, self._origin_ms = origin, origin_ms

    def when_ms(self, mark: Any) -> float:
        """Of a mark that the device has reached; it may lie before others that were asked for."""
        elapsed = float(self._origin.elapsed_time(mark))
        when = self._origin_ms + elapsed
        if elapsed > MAX_ELAPSED_MS:
            self._origin, self._origin_ms = mark, when
        return when
