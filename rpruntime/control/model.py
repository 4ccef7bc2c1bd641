"""A model: its open iteration and those whose step is not done, which version and which buffers they read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rpruntime.control.events import ModelAddedEvent
from rpruntime.control.lifetimes import Lifetimes, Reader
from rpruntime.control.outbox import Outbox
from rpruntime.control.versions import Versions
from rpruntime.store.handle import Payload
from rpruntime.wire.messages import DataReadyMsg, Key, StepDoneMsg, WeightsReadyMsg
from rpruntime.wire.succession import Buffers, ModelState

Place = tuple[int, int]
"""(call, micro-batch) after which buffers are meant."""


@dataclass
class Iteration:
    """All calls between two steps."""

    start: Place
    """Whose buffers it started with."""
    kept: tuple[int, ...] = ()
    """Calls of older controllers whose sums the optimizer has."""
    calls: list[int] = field(default_factory=list)
    """All its calls here, discarded ones too."""
    wanted: list[int] = field(default_factory=list)
    """Calls whose gradients wait for the step, or have been given to it."""
    num_microbatches: int = 0
    """Of all its calls so far, those of older controllers too."""
    done: StepDoneMsg | None = None
    """The optimizer has done its step; calls of it may not have finished here."""

    @property
    def first_call(self) -> int:
        """The first call that a failure takes along."""
        return (*self.kept, *self.calls)[0]


class Model:
    """The counters of a model that the roles have loaded.

    Attributes:
        iteration: the open one.
        iterations: that and those whose step is not done, ascending.
        head: whose buffers the next call reads.
        first_device: whose turn it is.
        step_offset: steps of the training before iteration 0 here (a resumed run; negative where versions were
            skipped).
        seed: of a resumed run; None: the model's own.
    """

    def __init__(self, spec: ModelAddedEvent, lifetimes: Lifetimes, out: Outbox) -> None:
        self.number = spec.model
        self.spec = spec
        self.versions = Versions(spec.model, lifetimes, out)
        self.head: Place = (-spec.model, 0)
        self.iteration = 0 if spec.found is None else spec.found.version
        self.iterations = {self.iteration: Iteration(self.head)}
        self.first_device = 0
        self.step_offset = 0
        self.seed: int | None = None
        self._base_version = self.iteration
        """The oldest version that an asynchronous iteration may read: 0, or where the last failure left off."""
        self._lifetimes = lifetimes
        self._out = out

    @property
    def open(self) -> Iteration:
        """The open iteration."""
        return self.iterations[self.iteration]

    def version_read(self) -> int:
        """The version that the open iteration reads (staleness 1 when asynchronous)."""
        if not self.spec.asynchronous:
            return self.iteration
        return max(self._base_version, self.iteration - 1)

    def unfinished_steps(self) -> tuple[int, ...]:
        """Steps issued and not done."""
        return tuple(step for step in self.iterations if step < self.iteration)

    def buffered(self) -> frozenset[int]:
        """Positions of the layers that have buffers."""
        return frozenset(position for position, _ in self.spec.buffers)

    def count_in(self, call: int, num_microbatches: int) -> None:
        """A training call belongs to the open iteration."""
        self.open.calls.append(call)
        self.open.wanted.append(call)
        self.open.num_microbatches += num_microbatches

    def publish(self, msg: WeightsReadyMsg) -> None:
        """The optimizer has written weights."""
        oldest = min(self.iterations) - 1  # its slots may still be handed to a replacement
        self.versions.publish(msg, self.version_read(), oldest)

    def go_on_from(self, found: ModelState) -> None:
        """Counters as an older controller left them, and the version before where the open iteration reads it."""
        self.open.kept = found.calls
        self.open.wanted = list(found.calls)
        self.open.num_microbatches = found.num_microbatches
        self.step_offset, self.seed = found.step_offset, found.seed
        if found.previous:
            self._base_version = found.version - 1
            scale = dict(found.scales).get(self._base_version, 1.0)
            self.publish(WeightsReadyMsg(self.number, self._base_version, tuple(enumerate(found.previous)), scale))

    # --- iterations

    def seal(self) -> None:
        """The open iteration's step has been issued; the next one opens."""
        self.iteration += 1
        self.iterations[self.iteration] = Iteration(self.head)
        self._hold_start()
        self.versions.retire(self.version_read())

    def close(self, step: int) -> Iteration:
        """An iteration is over with its step."""
        self._release_start(step)
        return self.iterations.pop(step)

    def rewind(self, iteration: int) -> None:
        """Counters and buffers as after step `iteration - 1`; versions are retired by the caller."""
        start = self.iterations[iteration].start
        self.move_head(start)
        for later in [t for t in self.iterations if t > iteration]:
            self.close(later)
        self.iterations[iteration] = Iteration(start)
        self.iteration = self._base_version = iteration

    def jump(self, iteration: int, start: Place, buffers: Buffers, *, previous: bool) -> Iteration:
        """Weights and buffers are replaced: `iteration` opens in place of the open one, which had no step, and is
        returned. `previous`: it reads the version before its own number."""
        left, old = self.iteration, self.iterations.pop(self.iteration)
        self.iteration = iteration
        self.iterations[iteration] = Iteration(start)
        self._base_version = iteration - int(previous)
        self.start_from(start, buffers)
        self._release_start(left)
        return old

    # --- buffers

    def start_from(self, start: Place, buffers: Buffers) -> None:
        """The open iteration starts with these buffers, which lie in the controller's or the optimizer's memory."""
        self._hold_start()
        self.begin_with(start, buffers)

    def begin_with(self, place: Place, buffers: Buffers) -> None:
        """The next call reads these buffers."""
        for position, payload in buffers:
            key: Key = ("buffer", *place, position)
            self._lifetimes.hold(key, ("head", self.number))
            msg = DataReadyMsg(self.number, key, payload)
            self._lifetimes.provide(msg, self._out.owner)
            self._out.send_workers(msg)
        self.move_head(place)

    def move_head(self, to: Place) -> None:
        """The next call reads these buffers, which are there or will be."""
        old, self.head = self.head, to
        for position, _ in self.spec.buffers:
            self._lifetimes.hold(("buffer", *to, position), ("head", self.number))
            if old != to:
                self._lifetimes.release(("head", self.number), ("buffer", *old, position))

    def buffers(self, place: Place) -> dict[int, Payload]:
        """What lies at a place whose calls have finished, by position."""
        found = {}
        for key in self.buffer_keys(place):
            announced = self._lifetimes.announced(key)
            assert announced is not None
            found[key[3]] = announced[0].payload
        return found

    def hold_buffers(self, place: Place, reader: Reader) -> None:
        """Somebody besides slots will read what lies at a place."""
        for key in self.buffer_keys(place):
            self._lifetimes.hold(key, reader)

    def _hold_start(self) -> None:
        self.hold_buffers(self.open.start, ("start", self.number, self.iteration))

    def _release_start(self, iteration: int) -> None:
        self._lifetimes.release(("start", self.number, iteration))

    def buffer_keys(self, place: Place) -> list[Key]:
        """Of all layers that have buffers."""
        return [("buffer", *place, position) for position, _ in self.spec.buffers]

    def forget(self) -> None:
        """Drop its buffers; its weights go with `versions.forget`."""
        for place in (self.head, *(iteration.start for iteration in self.iterations.values())):
            for key in self.buffer_keys(place):
                self._lifetimes.drop(key)

    def validate(self, training: Iterable[tuple[int, int]]) -> None:
        """Re-derive the redundant state (tests).

        Args:
            training: (iteration, call) of every training call that is known.
        """
        self.versions.validate()
        assert list(self.iterations) == sorted(self.iterations) and max(self.iterations) == self.iteration
        assert self.open.done is None
        listed = [(number, call) for number, found in self.iterations.items() for call in found.calls]
        assert sorted(listed) == sorted(training)
        held = self._lifetimes.reads
        assert held(("head", self.number)) == {*self.buffer_keys(self.head)}
        for number, found in self.iterations.items():
            assert held(("start", self.number, number)) == {*self.buffer_keys(found.start)}
            assert {*found.wanted} <= {*found.kept, *found.calls}
        starts = self._lifetimes.holders("start")
        assert {holder[2] for holder in starts if holder[1] == self.number} <= self.iterations.keys()
