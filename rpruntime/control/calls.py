"""The calls that are not over: what of each is still to come, and what it has given so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rpruntime.control.coverage import Coverage, TaskOrder
from rpruntime.control.events import CallEvent, FinishCall, OutputTakenEvent
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.outbox import Outbox
from rpruntime.rounding import rounded_to_single
from rpruntime.store.handle import Payload
from rpruntime.wire.messages import CallMsg, Key, LossReadyMsg, SlabReadyMsg


@dataclass
class Call:
    """One that has neither been stepped nor cancelled nor, for inference, been fetched."""

    event: CallEvent
    iteration: int
    msg: CallMsg
    """What its workers were told."""
    open_slots: set[int] = field(default_factory=set)
    slabs: dict[tuple[int, int], tuple[str, SlabReadyMsg]] = field(default_factory=dict)
    """(slot, position) -> who told the optimizer of its gradients, and the message."""
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    outputs: dict[int, Payload] = field(default_factory=dict)
    finished: bool = False
    coverage: Coverage | None = None
    """Of a call whose tasks are submitted one by one."""
    orders: dict[int, TaskOrder] = field(default_factory=dict)
    """Its tasks so far, by slot."""
    unread: dict[int, set[Key]] = field(default_factory=dict)
    """Keys of each micro-batch that are kept for tasks yet to come."""

    @property
    def number(self) -> int:
        """Calls are numbered across all models."""
        return self.event.call

    @property
    def model(self) -> int:
        """The number of its model."""
        return self.event.model

    @property
    def is_running(self) -> bool:
        """Whether slots are open or yet to come."""
        return bool(self.open_slots) or not (self.coverage is None or self.coverage.is_complete)

    @property
    def can_fail(self) -> bool:
        """Whether it goes with a failed iteration: one of inference whose outputs are being fetched does not."""
        return not (self.event.inference and self.finished)

    def combined_loss(self) -> float:
        """The fp32 sum, in order, of the weighted losses (docs/numerics.md)."""
        total = 0.0
        for m in sorted(self.losses):
            if self.event.weights[m] != 0:
                numerator, denominator = self.event.coefficients[m]
                loss = self.losses[m]
                term = loss if numerator == 1 else rounded_to_single(loss * numerator)
                total = rounded_to_single(total + rounded_to_single(term / denominator))
        return total

    def result(self) -> FinishCall:
        """What the script is told at its end."""
        microbatches = range(len(self.event.inputs))
        return FinishCall(
            self.number,
            self.combined_loss(),
            tuple(self.losses.get(m, 0.0) for m in microbatches),
            tuple(self.metrics.get(m, {}) for m in microbatches),
            self.event.weights,
            self.event.scale,
            tuple(self.outputs[m] for m in sorted(self.outputs)),
        )


class Calls:
    """All of them, by number."""

    def __init__(self, lifetimes: Lifetimes, out: Outbox) -> None:
        self._lifetimes = lifetimes
        self._out = out
        self._calls: dict[int, Call] = {}

    def __getitem__(self, number: int) -> Call:
        return self._calls[number]

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def __iter__(self) -> Iterator[int]:
        return iter(self._calls)

    def of_model(self, model: int) -> list[Call]:
        """The calls of a model."""
        return [call for call in self._calls.values() if call.model == model]

    def add(self, call: Call) -> None:
        """A call begins."""
        self._calls[call.number] = call

    def remove(self, numbers: Iterable[int]) -> None:
        """These are over: nothing of them is named any more, or their step is done."""
        for number in numbers:
            del self._calls[number]

    def on_loss(self, msg: LossReadyMsg) -> None:
        """A micro-batch has its loss."""
        call = self._calls.get(msg.call)
        if call is not None:
            call.losses[msg.microbatch] = msg.loss
            call.metrics[msg.microbatch] = msg.metrics

    def finish(self, call: Call) -> None:
        """Its last slot has committed."""
        call.finished = True
        self._out.add(call.result())
        if call.event.inference and not call.event.wants_output:
            del self._calls[call.number]

    def on_output_taken(self, event: OutputTakenEvent) -> None:
        """The script has what an inference call gave."""
        self._calls.pop(event.call, None)
        self._lifetimes.release(("output", event.call))

    def keys(self, numbers: Iterable[int]) -> list[Key]:
        """All live keys of these calls' data: everything but weights."""
        wanted = frozenset(numbers)
        return [key for key in self._lifetimes.live_keys() if key[0] != "weights" and key[1] in wanted]

    def forget_model(self, model: int) -> None:
        """Drop all that the calls of a model have given and read."""
        for call in self.of_model(model):
            for key in self.keys([call.number]):
                self._lifetimes.drop(key)
            self._lifetimes.release(("open", call.number))
            del self._calls[call.number]

    def validate(self) -> None:
        """Numbers agree (tests); open slots are compared by who knows them."""
        assert all(number == call.number for number, call in self._calls.items())
