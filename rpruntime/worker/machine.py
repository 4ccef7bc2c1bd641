"""The worker's brain: which slot and which micro-batch runs next. No sockets, clock, torch or threads.

Slots run in queue order, micro-batches in their order within the slot. A micro-batch starts when the events for all
that it reads have come; weights of the next slot are staged while one computes (two slots' weights at most).

    TaskMsg, CallMsg, DataReadyMsg, WeightsReadyMsg  ->  StageWeights, RunMicrobatch, FinishSlot   (to the shell)
    PublishedEvent, SlabEvent, SlotDoneEvent         ->  DataReadyMsg, SlabReadyMsg, SlotCommittedMsg (to the peers)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.messages import (
    CallMsg,
    CancelledMsg,
    CancelMsg,
    DataReadyMsg,
    ErrorInfo,
    FreeMsg,
    Key,
    LossReadyMsg,
    ModelReadyMsg,
    ModelSpec,
    SlabPart,
    SlabReadyMsg,
    SlotCommittedMsg,
    SlotFailedMsg,
    SlotTask,
    TaskMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)

CONTROLLER = "controller"
OPTIMIZER = "optimizer"
STAGED_SLOTS = 2
"""Slots whose weights may be on the device at once: the one that computes and the next."""


# --- from the shell


@dataclass(frozen=True)
class LaunchedEvent:
    """The shell has carried out the last `RunMicrobatch` or `FinishSlot`, as far as the host is concerned."""


@dataclass(frozen=True)
class PublishedEvent:
    """`key` lies in host memory. `own` are the extents that this worker allocated for it."""

    slot: int
    key: Key
    payload: Payload
    own: tuple[Extent, ...]


@dataclass(frozen=True)
class LossEvent:
    """The loss of a micro-batch has reached the host."""

    slot: int
    microbatch: int
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class SlabEvent:
    """The summed gradients of a position have reached the host."""

    slot: int
    position: int
    parts: tuple[SlabPart, ...]


@dataclass(frozen=True)
class SlotDoneEvent:
    """Everything that the slot writes has been published."""

    slot: int
    spans: tuple[tuple[str, int, int, int, float, float], ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True)
class SlotFailedEvent:
    """The user's code raised."""

    slot: int
    error: ErrorInfo


@dataclass(frozen=True)
class SlotDroppedEvent:
    """Nothing of a dropped slot is in flight; `own` are the extents that it had allocated."""

    slot: int
    own: tuple[Extent, ...]


@dataclass(frozen=True)
class ModelBuiltEvent:
    """The shell has built a model's modules."""

    model: int


# --- to the shell


@dataclass(frozen=True)
class Send:
    """Send a message to a role."""

    role: str
    msg: Any


@dataclass(frozen=True)
class BuildModel:
    """Build the modules of a model."""

    msg: ModelSpec


@dataclass(frozen=True)
class ForgetModel:
    """Drop the modules of a model."""

    model: int


@dataclass(frozen=True)
class StageWeights:
    """Start uploading the weights of a slot: unit -> extent."""

    task: SlotTask
    units: dict[int, Extent]


@dataclass(frozen=True)
class RunMicrobatch:
    """Run one micro-batch of a slot. `inputs` holds the payload of each key that it reads."""

    task: SlotTask
    call: CallMsg
    microbatch: int
    inputs: dict[Key, Payload]


@dataclass(frozen=True)
class FinishSlot:
    """All micro-batches are launched: hand over the gradients, commit when everything is published."""

    task: SlotTask


@dataclass(frozen=True)
class DropSlot:
    """Forget a slot; answer with `SlotDroppedEvent` when none of its copies is in flight."""

    task: SlotTask


@dataclass(frozen=True)
class FreeOwn:
    """Free extents of this worker's arena."""

    extents: tuple[Extent, ...]


Instruction = Send | BuildModel | ForgetModel | StageWeights | RunMicrobatch | FinishSlot | DropSlot | FreeOwn


@dataclass
class _Progress:
    task: SlotTask
    next_index: int = 0
    products: list[tuple[Key, tuple[Extent, ...]]] = field(default_factory=list)
    failed: bool = False


class WorkerMachine:
    """One per worker process.

    Args:
        role: this worker's.
        peers: all workers' roles.
    """

    def __init__(self, role: str, peers: tuple[str, ...]) -> None:
        self.role = role
        self._peers = peers
        self._models: dict[int, ModelSpec] = {}
        self._calls: dict[int, CallMsg] = {}
        self._newest_call: dict[int, int] = {}
        """Of each model: calls of two models may come in another order than that of their numbers."""
        self._data: dict[int, dict[Key, Payload]] = {}
        self._buffers: dict[int, dict[Key, Payload]] = {}
        self._weights: dict[tuple[int, int], dict[int, Extent]] = {}
        self._queue: deque[SlotTask] = deque()
        self._staged: list[int] = []
        self._open: dict[int, _Progress] = {}
        """Slots that have started and not committed, in order; the current one is the last."""
        self._current: int | None = None
        self._busy: int | None = None
        """The slot whose `RunMicrobatch` or `FinishSlot` the shell is carrying out."""
        self._cancels: list[tuple[CancelMsg, set[int], list[Extent]]] = []
        self._out: list[Instruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelSpec: self._on_load,
            UnloadModelMsg: self._on_unload,
            ModelBuiltEvent: lambda event: self._send(CONTROLLER, ModelReadyMsg(event.model, self.role)),
            CallMsg: self._on_call,
            TaskMsg: lambda msg: self._queue.append(msg.task),
            DataReadyMsg: self._on_data,
            WeightsReadyMsg: self._on_weights,
            CancelMsg: self._on_cancel,
            FreeMsg: lambda msg: self._out.append(FreeOwn(msg.extents)),
            LaunchedEvent: self._on_launched,
            PublishedEvent: self._on_published,
            LossEvent: self._on_loss,
            SlabEvent: self._on_slab,
            SlotDoneEvent: self._on_done,
            SlotFailedEvent: self._on_failed,
            SlotDroppedEvent: self._on_dropped,
        }

    def handle(self, *events: Any) -> list[Instruction]:
        """Take messages and events in, in order; returns what is to be done, in order."""
        for event in events:
            self._handlers[type(event)](event)
        self._advance()
        out, self._out = self._out, []
        return out

    def understands(self, message: Any) -> bool:
        """Whether a peer's message is for this machine."""
        return type(message) in self._handlers

    @property
    def is_idle(self) -> bool:
        """No task is queued or open."""
        return not self._queue and not self._open

    # --- models and data

    def _on_load(self, msg: ModelSpec) -> None:
        self._models[msg.model] = msg
        self._buffers[msg.model], self._data[msg.model] = {}, {}
        self._newest_call[msg.model] = 0
        self._out.append(BuildModel(msg))

    def _on_unload(self, msg: UnloadModelMsg) -> None:
        tables: tuple[dict[int, Any], ...] = (self._models, self._buffers, self._data, self._newest_call)
        for table in tables:
            table.pop(msg.model, None)
        self._weights = {key: found for key, found in self._weights.items() if key[0] != msg.model}
        self._out.append(ForgetModel(msg.model))

    def _on_call(self, msg: CallMsg) -> None:
        used = {task.call for task in self._queue} | {progress.task.call for progress in self._open.values()}
        self._calls = {number: call for number, call in self._calls.items() if number in used}
        self._calls[msg.call] = msg
        self._newest_call[msg.model] = max(self._newest_call[msg.model], msg.call)
        held = self._data[msg.model]
        self._data[msg.model] = {key: payload for key, payload in held.items() if self._may_read(msg.model, key)}
        self._prune_buffers(msg.model)

    def _prune_buffers(self, model: int) -> None:
        oldest = min(call.buffers_kept for call in self._calls.values() if call.model == model)
        held = self._buffers[model]
        self._buffers[model] = {key: payload for key, payload in held.items() if key[1] >= oldest}

    def _may_read(self, model: int, key: Key) -> bool:
        """Whether the key's call has tasks here, or has yet to come."""
        return key[1] in self._calls or key[1] > self._newest_call[model]

    def _on_data(self, msg: DataReadyMsg) -> None:
        if msg.model not in self._models:
            return
        if msg.key[0] == "buffer":
            self._buffers[msg.model][msg.key] = msg.payload
        elif self._may_read(msg.model, msg.key):
            self._data[msg.model][msg.key] = msg.payload

    def _on_weights(self, msg: WeightsReadyMsg) -> None:
        for unit, extent in msg.units:
            versions = self._weights.setdefault((msg.model, unit), {})
            versions[msg.version] = extent
            for old in [version for version in versions if version < msg.version - 2]:
                del versions[old]

    # --- running

    def _advance(self) -> None:
        self._stage_next()
        if self._busy is not None:
            return
        if self._current is None and not self._start_next():
            return
        assert self._current is not None
        progress = self._open[self._current]
        task = progress.task
        if progress.next_index == len(task.microbatches):
            self._current = None
            self._busy = task.slot
            self._out.append(FinishSlot(task))
            return
        microbatch = task.microbatches[progress.next_index]
        inputs = self._inputs(task, microbatch)
        if inputs is not None:
            progress.next_index += 1
            self._busy = task.slot
            self._out.append(RunMicrobatch(task, self._calls[task.call], microbatch, inputs))

    def _start_next(self) -> bool:
        if not self._queue or self._queue[0].slot not in self._staged:
            return False
        task = self._queue.popleft()
        self._open[task.slot] = _Progress(task)
        self._current = task.slot
        self._stage_next()
        return True

    def _stage_next(self) -> None:
        for task in list(self._queue)[:STAGED_SLOTS]:
            if task.slot in self._staged:
                continue
            if len(self._staged) >= STAGED_SLOTS:
                return
            units = self._units_of(task)
            if units is None:
                return
            self._staged.append(task.slot)
            self._out.append(StageWeights(task, units))

    def _units_of(self, task: SlotTask) -> dict[int, Extent] | None:
        units = {}
        for position in range(*task.layers):
            for unit in self._models[task.model].layers[position].units:
                extent = self._weights.get((task.model, unit), {}).get(task.version)
                if extent is None:
                    return None
                units[unit] = extent
        return units

    def _inputs(self, task: SlotTask, m: int) -> dict[Key, Payload] | None:
        """Payloads of all that a micro-batch reads, or None: something has not come yet."""
        found = {}
        for key in self._keys_read(task, m):
            held = self._buffers if key[0] == "buffer" else self._data
            payload = held[task.model].get(key)
            if payload is None:
                return None
            found[key] = payload
        return found

    def _keys_read(self, task: SlotTask, m: int) -> list[Key]:
        model, call = self._models[task.model], self._calls[task.call]
        start, stop = task.layers
        keys: list[Key] = [("act", task.call, m, start)]
        if task.kind == "backward":
            keys.append(("agrad", task.call, m, stop))
            if model.recompute == "layer":
                keys += [("act", task.call, m, position) for position in range(start + 1, stop)]
        elif stop == len(model.layers) and call.has_labels:
            keys.append(("label", task.call, m))
        before = call.buffers_from if m == 0 or task.kind == "infer" else (task.call, m - 1)
        keys += [("buffer", *before, position) for position in range(start, stop) if model.layers[position].buffers]
        return keys

    def _on_launched(self, event: LaunchedEvent) -> None:
        self._busy = None

    # --- what the shell has brought to the host

    def _on_published(self, event: PublishedEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is None:
            return
        progress.products.append((event.key, event.payload.extents()))
        msg = DataReadyMsg(progress.task.model, event.key, event.payload)
        for role in self._readers(progress.task, event.key):
            if role == self.role:
                self._on_data(msg)
            else:
                self._send(role, msg)

    def _readers(self, task: SlotTask, key: Key) -> tuple[str, ...]:
        if key[0] == "act":
            return dict(task.publish)[key[3]]
        if key[0] == "agrad":
            return task.grad_to
        if key[0] == "buffer":
            if key[2] == self._calls[task.call].num_microbatches - 1:  # the next call's workers are not known yet
                return (*self._peers, CONTROLLER)
            return tuple(dict.fromkeys((self.role, *task.buffer_to)))
        assert key[0] == "out"
        return (CONTROLLER,)

    def _on_loss(self, event: LossEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is not None:
            self._send(CONTROLLER, LossReadyMsg(progress.task.call, event.microbatch, event.loss, event.metrics))

    def _on_slab(self, event: SlabEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is None:
            return
        task = progress.task
        for part in event.parts:
            key: Key = ("slab", task.call, task.slot, event.position, part.unit)
            progress.products.append((key, (part.extent,)))
        self._send(OPTIMIZER, SlabReadyMsg(task.model, task.call, task.slot, event.position, event.parts))

    def _on_done(self, event: SlotDoneEvent) -> None:
        progress = self._open.pop(event.slot, None)
        if progress is None:
            return
        self._staged.remove(event.slot)
        task = progress.task
        products = tuple(progress.products)
        self._send(CONTROLLER, SlotCommittedMsg(task.slot, self.role, products, event.spans, event.peak_bytes))

    # --- failures and cancels

    def _on_failed(self, event: SlotFailedEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is None:  # cancelled while it ran
            self._busy = None
            return
        progress.failed = True
        self._send(CONTROLLER, SlotFailedMsg(event.slot, progress.task.call, self.role, event.error))
        # stays current and busy, so nothing of this worker's queue runs before the controller's cancel

    def _on_cancel(self, msg: CancelMsg) -> None:
        gone = {
            number
            for number, call in self._calls.items()
            if call.model == msg.model and msg.first_call <= number <= msg.last_call
        }
        waits = set()
        for task in [task for task in self._queue if task.call in gone]:
            self._queue.remove(task)
            if task.slot in self._staged:
                waits.add(task.slot)
                self._out.append(DropSlot(task))
        for slot, progress in list(self._open.items()):
            if progress.task.call in gone:
                waits.add(slot)
                self._out.append(DropSlot(progress.task))
                if progress.failed:
                    self._busy = None
                del self._open[slot]
        if self._current in waits:
            self._current = None
        self._staged = [slot for slot in self._staged if slot not in waits]
        data = self._data.get(msg.model, {})
        for key in [key for key in data if key[1] in gone]:
            del data[key]
        for number in gone:
            del self._calls[number]
        self._cancels.append((msg, waits, []))
        self._answer_cancels()

    def _on_dropped(self, event: SlotDroppedEvent) -> None:
        for _, waits, extents in self._cancels:
            if event.slot in waits:
                waits.discard(event.slot)
                extents.extend(event.own)
        self._answer_cancels()

    def _answer_cancels(self) -> None:
        for msg, waits, extents in list(self._cancels):
            if not waits:
                self._cancels.remove((msg, waits, extents))
                self._send(CONTROLLER, CancelledMsg(msg.model, msg.first_call, self.role, tuple(extents)))

    def _send(self, role: str, msg: Any) -> None:
        self._out.append(Send(role, msg))
