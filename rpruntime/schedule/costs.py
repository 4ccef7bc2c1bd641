"""What layers cost: checked lists of times and sizes, and the time of a slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpruntime.errors import ConfigError
from rpruntime.schedule.dispatch import Slot


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds per layer and micro-batch; `backward_ms` includes the recomputation of the forward.

    Attributes:
        forward_sum, backward_sum: times of the layers below an index, L + 1 values.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    forward_sum: tuple[float, ...]
    backward_sum: tuple[float, ...]

    @classmethod
    def of(cls, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> LayerTimes:
        """Checked times.

        Raises:
            ConfigError: the lists are empty, differ in length, or hold something that is no time.
        """
        forward, backward = numbers("forward_ms", forward_ms), numbers("backward_ms", backward_ms)
        if not forward:
            raise ConfigError("forward_ms is empty: there is no layer")
        if len(forward) != len(backward):
            raise ConfigError(f"forward_ms has {len(forward)} layers, backward_ms {len(backward)}")
        return cls(forward, backward, _sums(forward), _sums(backward))

    @property
    def num_layers(self) -> int:
        return len(self.forward_ms)

    def slot_ms(self, slot: Slot) -> float:
        """Time of one micro-batch in a slot.

        A fused stage runs forward and backward, and its forward is the recomputation: the sum of `backward_ms`.
        A backward slot with the model's last layer comes right after that layer's forward (bound schedules), and
        does not recompute it.
        """
        start, stop = slot.layers.start, slot.layers.stop
        if slot.kind in ("forward", "infer"):
            return self.forward_sum[stop] - self.forward_sum[start]
        total = self.backward_sum[stop] - self.backward_sum[start]
        if slot.kind == "backward" and stop == self.num_layers:
            total = max(0.0, total - self.forward_ms[-1])
        return total


def numbers(name: str, values: Sequence[float], num_layers: int | None = None) -> tuple[float, ...]:
    """`values` as floats; ConfigError naming the first that is not a finite number from 0 on."""
    checked: list[float] = []
    for layer, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{name}[{layer}] is {value!r}, not a number") from None
        if not math.isfinite(number) or number < 0:
            raise ConfigError(f"{name}[{layer}] is {value!r}; it must be finite and not negative")
        checked.append(number)
    if num_layers is not None and len(checked) != num_layers:
        raise ConfigError(f"{name} has {len(checked)} values for {num_layers} layers")
    return tuple(checked)


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))
