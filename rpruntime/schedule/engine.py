"""An event-driven simulator: one device runs one micro-batch at a time, in the order of its slots.

    hand over slots ---> a device's queue ---> upload weights (two slots' at most) ---> run micro-batches in order
                                                                                        |  one hop to another device
                         the next stage's device <--------------------------------------+

A micro-batch starts when its device is free, its input has arrived, the slot's weights are there, and the iteration
may begin. Nothing here decides an order: that is the dispatch sequence's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from rpruntime.errors import RoundPipeError
from rpruntime.schedule.dispatch import Slot
from rpruntime.schedule.sequence import DispatchSequence

_END, _ARRIVE, _UPLOADED, _POLL = range(4)


class DeadlockError(RoundPipeError):
    """Slots wait for each other; the message names each device's slot and what it waits for."""


@dataclass(frozen=True)
class Span:
    """`kind` of work on a device from `start_ms` to `end_ms`; an upload has micro-batch -1."""

    device: int
    kind: str
    layers: range
    microbatch: int
    iteration: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Limits:
    """How much may be under way; None: any number.

    Attributes:
        queue: slots that a device has been handed and not begun.
        outputs: outputs on a device that are not copied away yet.
        rounds: rounds whose activations the host has room for.
        between: micro-batches waiting between two stages. A value below the micro-batches of a round can
            deadlock: the stage that would take them may be on a device that is still producing them.
    """

    queue: int | None = None
    outputs: int | None = None
    rounds: int | None = None
    between: int | None = None


class Engine:
    """Runs a sequence once.

    Args:
        duration_ms: of a slot's micro-batch.
        upload_ms: of a slot's weights; None: weights are always there.
        hop_ms: from the end of a micro-batch to its arrival on another device.
    """

    def __init__(
        self,
        sequence: DispatchSequence,
        duration_ms: Callable[[Slot, int], float],
        *,
        hop_ms: float = 0.0,
        upload_ms: Callable[[Slot], float] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._slots = sequence.slots
        self._duration_ms = duration_ms
        self._upload_ms = upload_ms
        self._hop_ms = hop_ms
        self._limits = limits or Limits()
        self._lag = 2 if sequence.asynchronous else 1
        self._now = 0.0
        self._events: list[tuple[float, int, int, int, int]] = []
        self._num_events = 0
        self._handed = 0
        self._devices = [_Device(index) for index in range(sequence.num_devices)]
        for number, slot in enumerate(self._slots):
            self._devices[slot.device].slots.append(number)
        self._left = [len(slot.microbatches) for slot in self._slots]
        self._waiting_outputs = [0] * len(self._slots)
        self._link_chains(sequence.num_layers)
        self._iteration_left = [0] * sequence.iterations
        for slot in self._slots:
            self._iteration_left[slot.iteration] += len(slot.microbatches)
        self._first_open = 0  # iterations before this one have ended
        self._link_rounds()
        for device in self._devices:
            device.plan_weights(self._slots)
        self.spans: list[Span] = []
        self.uploads: list[Span] = []

    def run(self) -> None:
        """To the end.

        Raises:
            DeadlockError: nothing can move and not everything has run.
        """
        self._hand_over()
        for device in self._devices:
            self._advance(device)
        while self._events:
            self._now, _, kind, number, microbatch = heapq.heappop(self._events)
            device = self._devices[self._slots[number].device]
            if kind == _END:
                self._on_end(device, number, microbatch)
            elif kind == _ARRIVE:
                device.outputs -= 1
                self._arrived.add((self._next[number, microbatch], microbatch))
                self._advance(self._devices[self._slots[self._next[number, microbatch]].device])
            elif kind == _UPLOADED:
                device.uploading = False
                device.num_loaded += 1
            self._advance(device)
        if any(self._left):
            raise DeadlockError("the schedule is stuck:\n" + "\n".join(self._stuck()))

    def _link_chains(self, num_layers: int) -> None:
        chains: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, slot in enumerate(self._slots):
            forward = slot.kind in ("forward", "infer")
            place = slot.layers.start if forward else 2 * num_layers - slot.layers.stop
            for microbatch in slot.microbatches:
                chains.setdefault((slot.iteration, microbatch), []).append((place, number))
        self._arrived: set[tuple[int, int]] = set()
        self._next: dict[tuple[int, int], int] = {}
        self._previous: dict[tuple[int, int], int] = {}
        for (_, microbatch), chain in chains.items():
            chain.sort()
            self._arrived.add((chain[0][1], microbatch))
            for (_, before), (_, after) in pairwise(chain):
                self._next[before, microbatch] = after
                self._previous[after, microbatch] = before

    def _link_rounds(self) -> None:
        self._round_of: list[int] = []
        numbers: dict[tuple[int, int, int], int] = {}
        for slot in self._slots:
            key = (slot.iteration, slot.microbatches.start, slot.microbatches.stop)
            self._round_of.append(numbers.setdefault(key, len(numbers)))
        self._round_left = [0] * len(numbers)
        for index in self._round_of:
            self._round_left[index] += 1
        self._rounds_ended = 0  # rounds before this one have all ended

    def _hand_over(self) -> None:
        while self._handed < len(self._slots):
            device = self._devices[self._slots[self._handed].device]
            if self._limits.queue is not None and device.handed - device.begun >= self._limits.queue:
                return
            device.handed += 1
            self._handed += 1
            self._push(self._now, _POLL, self._handed - 1, 0)

    def _push(self, time: float, kind: int, number: int, microbatch: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, kind, number, microbatch))

    def _advance(self, device: _Device) -> None:
        self._upload(device)
        if device.busy or device.ended >= device.handed:
            return
        number = device.slots[device.ended]
        slot = self._slots[number]
        microbatch = slot.microbatches[len(slot.microbatches) - self._left[number]]
        if self._obstacle(device, number, microbatch) is not None:
            return
        device.busy = True
        end = self._now + self._duration_ms(slot, microbatch)
        self.spans.append(Span(device.index, slot.kind, slot.layers, microbatch, slot.iteration, self._now, end))
        self._push(end, _END, number, microbatch)
        if (before := self._previous.get((number, microbatch))) is not None:
            self._waiting_outputs[before] -= 1
            if self._limits.between is not None:
                self._push(self._now, _POLL, before, 0)
        if device.begun == device.ended:
            device.begun += 1
            self._hand_over()

    def _obstacle(self, device: _Device, number: int, microbatch: int) -> str | None:
        """What the micro-batch waits for; None: it may start."""
        slot, limits = self._slots[number], self._limits
        if (number, microbatch) not in self._arrived:
            before = self._slots[self._previous[number, microbatch]]
            return f"the output of '{before}'"
        if slot.iteration >= self._first_open + self._lag:
            return f"the end of iteration {slot.iteration - self._lag}"
        if device.num_loaded <= device.ended:
            return "its weights"
        if limits.outputs is not None and device.outputs >= limits.outputs:
            return "a place for its output"
        if limits.rounds is not None and self._round_of[number] >= self._rounds_ended + limits.rounds:
            return f"host room for round {self._round_of[number]}"
        if limits.between is not None and self._waiting_outputs[number] >= limits.between:
            after = self._next.get((number, slot.microbatches[0]))
            if after is not None:
                return f"'{self._slots[after]}' to take its output"
        return None

    def _on_end(self, device: _Device, number: int, microbatch: int) -> None:
        slot = self._slots[number]
        device.busy = False
        self._left[number] -= 1
        if self._left[number] == 0:
            device.ended += 1
            self._end_of_round(number)
        after = self._next.get((number, microbatch))
        if after is not None:
            self._waiting_outputs[number] += 1
            device.outputs += 1
            hop_ms = self._hop_ms if self._slots[after].device != device.index else 0.0
            self._push(self._now + hop_ms, _ARRIVE, number, microbatch)
        self._iteration_left[slot.iteration] -= 1
        if self._iteration_left[slot.iteration] == 0:
            while self._first_open < len(self._iteration_left) and self._iteration_left[self._first_open] == 0:
                self._first_open += 1
            self._poll_all()

    def _end_of_round(self, number: int) -> None:
        self._round_left[self._round_of[number]] -= 1
        while self._rounds_ended < len(self._round_left) and self._round_left[self._rounds_ended] == 0:
            self._rounds_ended += 1
            if self._limits.rounds is not None:
                self._poll_all()

    def _poll_all(self) -> None:
        for device in self._devices:
            if device.slots:
                self._push(self._now, _POLL, device.slots[0], 0)

    def _upload(self, device: _Device) -> None:
        """Uploads go in slot order, one at a time, into one of two places."""
        while not device.uploading and device.num_loaded < device.handed:
            position = device.num_loaded
            number = device.slots[position]
            slot = self._slots[number]
            if self._upload_ms is None or not device.must_load[position]:
                device.num_loaded += 1
                continue
            if device.ended <= device.frees[position] or slot.iteration >= self._first_open + self._lag:
                return
            device.uploading = True
            end = self._now + self._upload_ms(slot)
            self.uploads.append(Span(device.index, "upload", slot.layers, -1, slot.iteration, self._now, end))
            self._push(end, _UPLOADED, number, 0)

    def _stuck(self) -> list[str]:
        lines: list[str] = []
        for device in self._devices:
            if device.ended < device.handed:
                number = device.slots[device.ended]
                slot = self._slots[number]
                microbatch = slot.microbatches[len(slot.microbatches) - self._left[number]]
                obstacle = self._obstacle(device, number, microbatch)
                lines.append(f"  '{slot}', micro-batch {microbatch}, waits for {obstacle}")
            elif device.ended < len(device.slots):
                lines.append(f"  '{self._slots[device.slots[device.ended]]}' has not been handed over")
        return lines


class _Device:
    def __init__(self, index: int) -> None:
        self.index = index
        self.slots: list[int] = []
        self.handed = self.begun = self.ended = 0  # of `slots`, in order
        self.num_loaded = 0  # of `slots`: weights are there
        self.uploading = False
        self.busy = False
        self.outputs = 0
        self.must_load: list[bool] = []
        self.frees: list[int] = []
        """For each slot: the position whose end frees the place for its weights; -1: free from the start."""

    def plan_weights(self, slots: tuple[Slot, ...]) -> None:
        """Two places: a slot whose layers are in neither takes the place that was not used last."""
        resident: list[tuple[tuple[int, range], int]] = []  # (weights, last position that uses them), newest last
        for position, number in enumerate(self.slots):
            key = (slots[number].iteration, slots[number].layers)
            held = [entry for entry in resident if entry[0] == key]
            freed = -1
            if held:
                resident.remove(held[0])
            elif len(resident) == 2:
                freed = resident.pop(0)[1]
            resident.append((key, position))
            self.must_load.append(not held)
            self.frees.append(freed)
