"""Which layers run together: the stages of an iteration (paper section 3.2, asymmetric stage splitting)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpruntime.errors import ConfigError


@dataclass(frozen=True)
class ExecutionPlan:
    """Stages as ranges of layers.

    Attributes:
        forward: the stages before the fused one, ascending; may be empty.
        backward: in execution order (deepest first); `backward[0]` is the fused stage, whose forward serves as the
            recompute. `forward` and `backward[0]` cover each layer once, `backward` covers each layer once.
        round_size: micro-batches of a round (M_R); None: all of a call in one round. A value below the number of
            devices, and a short last round, are legal and only cost bubbles.

    Raises:
        ConfigError: a stage is empty, or the stages skip or repeat a layer.
    """

    forward: tuple[range, ...]
    backward: tuple[range, ...]
    round_size: int | None = None

    def __init__(self, forward: Iterable[range], backward: Iterable[range], round_size: int | None = None) -> None:
        object.__setattr__(self, "forward", tuple(forward))
        object.__setattr__(self, "backward", tuple(backward))
        object.__setattr__(self, "round_size", round_size)
        self._check()

    @classmethod
    def one_layer_a_stage(cls, num_layers: int, round_size: int | None = None) -> ExecutionPlan:
        """The plan that runs every layer as a stage of its own; the last one is fused."""
        return cls(
            [range(layer, layer + 1) for layer in range(num_layers - 1)],
            [range(layer, layer + 1) for layer in reversed(range(num_layers))],
            round_size,
        )

    @property
    def num_layers(self) -> int:
        """Layers that the plan covers."""
        return self.backward[0].stop

    @property
    def num_stages(self) -> int:
        """Slots of one round: forward and backward stages together."""
        return len(self.forward) + len(self.backward)

    def check_covers(self, num_layers: int) -> None:
        """Raises ConfigError unless this is a plan for a model of `num_layers` layers."""
        if self.num_layers != num_layers:
            raise ConfigError(
                f"the plan has {self.num_layers} layers, the model {num_layers}: backward[0] has to end with the "
                "model's last layer"
            )

    def microbatch_rounds(self, num_microbatches: int) -> list[range]:
        """The micro-batches of each round."""
        size = self.round_size or num_microbatches
        return [range(first, min(first + size, num_microbatches)) for first in range(0, num_microbatches, size)]

    def _check(self) -> None:
        if not self.backward:
            raise ConfigError("a plan needs at least the fused stage, backward[0]")
        for kind, stages in (("forward", self.forward), ("backward", self.backward)):
            for index, stage in enumerate(stages):
                if not isinstance(stage, range) or stage.step != 1:
                    raise ConfigError(f"{kind}[{index}] is {stage!r}; a stage is a range of layers such as range(0, 3)")
                if len(stage) == 0 or stage.start < 0:
                    raise ConfigError(f"{kind}[{index}] = {stage} holds no layer")
        if self.round_size is not None and (not isinstance(self.round_size, int) or self.round_size < 1):
            raise ConfigError(f"round_size must be a positive number of micro-batches or None, not {self.round_size!r}")
        _check_contiguous("forward then backward[0]", [*self.forward, self.backward[0]])
        _check_contiguous("backward, read from its end", list(reversed(self.backward)))


def _check_contiguous(what: str, stages: list[range]) -> None:
    expected = 0
    for stage in stages:
        if stage.start > expected:
            raise ConfigError(f"{what}: layer {expected} is in no stage (the next stage is {stage})")
        if stage.start < expected:
            raise ConfigError(f"{what}: layer {stage.start} is in two stages (the second is {stage})")
        expected = stage.stop
