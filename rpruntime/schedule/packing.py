"""Greedy packing of layers into stages under a time and a memory limit, with prefix sums and bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rpruntime.errors import ConfigError
from rpruntime.schedule.costs import LayerTimes, numbers

_SLACK = 1.0 + 1e-9
"""Sums of floats that should be equal differ in the last bits; a stage may be longer than t_max by this."""


@dataclass(frozen=True)
class Cut:
    """Stages as boundaries: forward stages cover [0, fused), backward stages [fused, 0), the fused one the rest."""

    forward: tuple[int, ...]
    """0, ..., fused"""
    backward: tuple[int, ...]
    """L, fused, ..., 0: descending"""

    @property
    def num_stages(self) -> int:
        return len(self.forward) + len(self.backward) - 2

    def stage_ms(self, times: LayerTimes) -> list[float]:
        """Times of the stages in dispatch order."""
        f, b = times.forward_sum, times.backward_sum
        forward = [f[stop] - f[start] for start, stop in pairwise(self.forward)]
        return forward + [b[stop] - b[start] for stop, start in pairwise(self.backward)]


class Packer:
    """Where stages must end, for given layers.

    Raises:
        ConfigError: sizes are missing or of another length, or a layer fits in no stage.
    """

    def __init__(
        self,
        times: LayerTimes,
        forward_bytes: Sequence[float] | None = None,
        backward_bytes: Sequence[float] | None = None,
        memory_limit: float | None = None,
    ) -> None:
        self.times = times
        self.num_layers = count = times.num_layers
        self.max_fused = count - 1
        """The latest layer at which the fused stage may start."""
        self.min_fused = 0
        """The earliest one that fits in memory."""
        if memory_limit is None:
            self._forward_stop = [count] * (count + 1)
            self._backward_start = [0] * (count + 1)
            return
        if forward_bytes is None or backward_bytes is None:
            raise ConfigError("memory_limit needs forward_bytes and backward_bytes")
        (limit,) = numbers("memory_limit", [memory_limit])
        forward = numbers("forward_bytes", forward_bytes, count)
        backward = numbers("backward_bytes", backward_bytes, count)
        _check_fits(backward, limit)
        self._forward_stop, self._backward_start = _reaches(forward, limit), _reaches(backward[::-1], limit)
        self._backward_start = [count - stop for stop in reversed(self._backward_start)]
        self.min_fused = self._backward_start[count]
        for layer, size in enumerate(forward[:-1]):
            if size > limit:  # it can only be in the fused stage
                self.max_fused = layer
                if self.min_fused > layer:
                    raise ConfigError(_no_stage(layer, size, limit))
                break

    def fused_start(self, t_max: float) -> int:
        """The fused stage filled to the brim: its first layer."""
        return self.backward_start(self.num_layers, t_max)

    def forward_stop(self, start: int, t_max: float) -> int:
        """The end of the longest forward stage from layer `start`; `start` itself if nothing fits."""
        sums = self.times.forward_sum
        return min(bisect_right(sums, sums[start] + t_max * _SLACK) - 1, self._forward_stop[start])

    def backward_start(self, stop: int, t_max: float) -> int:
        """The first layer of the longest backward stage that ends before `stop`; `stop` if nothing fits."""
        sums = self.times.backward_sum
        return max(bisect_left(sums, sums[stop] - t_max * _SLACK), self._backward_start[stop])

    def pack_forward(self, fused: int, t_max: float) -> tuple[int, ...] | None:
        """Boundaries of the fewest forward stages over [0, fused), each as long as can be; None: impossible."""
        bounds = [0]
        while bounds[-1] < fused:
            stop = min(self.forward_stop(bounds[-1], t_max), fused)
            if stop == bounds[-1]:
                return None
            bounds.append(stop)
        return tuple(bounds)

    def pack_backward(self, fused: int, t_max: float) -> tuple[int, ...] | None:
        """Boundaries of the fewest backward stages over [0, fused), from its end on; None: impossible."""
        bounds = [fused]
        while bounds[-1] > 0:
            start = self.backward_start(bounds[-1], t_max)
            if start == bounds[-1]:
                return None
            bounds.append(start)
        return tuple(bounds)

    def fits(self, cut: Cut) -> bool:
        """Whether every stage of the cut fits in memory."""
        return all(stop <= self._forward_stop[start] for start, stop in pairwise(cut.forward)) and all(
            start >= self._backward_start[stop] for stop, start in pairwise(cut.backward)
        )


def _reaches(sizes: Sequence[float], limit: float) -> list[int]:
    sums = list(accumulate(sizes, initial=0.0))
    return [bisect_right(sums, sums[start] + limit) - 1 for start in range(len(sums))]


def _check_fits(sizes: Sequence[float], limit: float) -> None:
    for layer, size in enumerate(sizes):
        if size > limit:
            raise ConfigError(_no_stage(layer, size, limit))


def _no_stage(layer: int, size: float, limit: float) -> str:
    return (
        f"layer {layer} fits in no stage: it needs {size:.0f} bytes on the device, the limit is {limit:.0f}; "
        "use smaller micro-batches or split the layer"
    )
