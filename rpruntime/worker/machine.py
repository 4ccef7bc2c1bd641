"""The worker's brain: which slot and which micro-batch runs next. No sockets, clock, torch or threads.

Slots run in the order of their numbers, micro-batches in their order within the slot. A micro-batch starts when the
events for all that it reads have come; weights of the next slot are staged while one computes (two slots' weights at
most), and a micro-batch's activations come up while the one before it computes. A slot that a dead worker left behind
has a lower number than what waits for it: it goes in between, and the weights that were staged for a slot that has not
started make room.

    TaskMsg, CallMsg, DataReadyMsg, WeightsReadyMsg  ->  StageWeights, Prefetch, RunMicrobatch, FinishSlot   (shell)
    PublishedEvent, SlabEvent, SlotDoneEvent         ->  DataReadyMsg, SlabReadyMsg, SlotCommittedMsg        (peers)

Whatever is published goes to the controller too: it knows what is left to do when a worker dies.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.messages import (
    AdoptMsg,
    CallMsg,
    CancelledMsg,
    CancelMsg,
    DataReadyMsg,
    FencedMsg,
    FenceMsg,
    ForgetMsg,
    FreeMsg,
    Key,
    LossReadyMsg,
    ModelReadyMsg,
    ModelSpec,
    SlabReadyMsg,
    SlotCommittedMsg,
    SlotFailedMsg,
    SlotTask,
    TaskMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)
from rpruntime.worker.events import (
    Adopt,
    BuildModel,
    DropSlot,
    FinishSlot,
    Forget,
    ForgetModel,
    FreeCaches,
    FreeOwn,
    Instruction,
    LaunchedEvent,
    LossEvent,
    ModelBuiltEvent,
    OutOfMemoryEvent,
    Prefetch,
    PublishedEvent,
    RunMicrobatch,
    Send,
    SlabEvent,
    SlotDoneEvent,
    SlotDroppedEvent,
    SlotFailedEvent,
    StageWeights,
)

CONTROLLER = "controller"
OPTIMIZER = "optimizer"
STAGED_SLOTS = 2
"""Slots whose weights may be on the device at once: the one that computes and the next."""
MAX_TRIES = 3
"""Of a slot on a device that is short of memory: as planned, again with caches freed, layer by layer."""


@dataclass
class _Progress:
    task: SlotTask
    next_index: int = 0
    failed: bool = False


@dataclass
class _Cancelling:
    msg: CancelMsg
    slots: set[int]
    """Slots of its calls whose copies may be in flight."""
    extents: list[Extent]


class WorkerMachine:
    """One per worker process.

    Args:
        role: this worker's.
        peers: all workers' roles.
        blocking: for measurements: a slot waits until the whole model has its version (the barrier of paper section
            4.3.2), not only its own layers.
    """

    def __init__(self, role: str, peers: tuple[str, ...], *, blocking: bool = False) -> None:
        self.role = role
        self._blocking = blocking
        self._peers = peers
        self._models: dict[int, ModelSpec] = {}
        self._calls: dict[int, CallMsg] = {}
        self._newest_call: dict[int, int] = {}
        """Of each model: calls of two models may come in another order than that of their numbers."""
        self._early: dict[int, list[DataReadyMsg]] = {}
        """Of models that this worker, a replacement, has not been told of yet."""
        self._unloaded: set[int] = set()
        self._data: dict[int, dict[Key, Payload]] = {}
        self._buffers: dict[int, dict[Key, Payload]] = {}
        self._weights: dict[tuple[int, int], dict[int, Extent]] = {}
        self._scales: dict[int, dict[int, float]] = {}
        """Model -> version -> loss scale of the iterations that read it."""
        self._queue: list[SlotTask] = []
        """Tasks that have not started, by number."""
        self._staged: list[int] = []
        self._open: dict[int, _Progress] = {}
        """Slots that have started and not committed."""
        self._running: list[int] = []
        """Those of them that are not launched to their end, ascending; the first one is the next to run."""
        self._busy: int | None = None
        """The slot whose `RunMicrobatch` or `FinishSlot` the shell is carrying out."""
        self._dropping: Counter[int] = Counter()
        """How many stages of a slot the shell is still dropping."""
        self._prefetched: dict[int, int] = {}
        """Slot -> its micro-batch whose inputs were asked for last."""
        self._announced: dict[int, list[Extent]] = {}
        """Own extents of an uncommitted slot that peers know of."""
        self._recovering = False
        """Whether a slot has just found too little memory: nothing is staged until all that was dropped is gone."""
        self._short: Counter[int] = Counter()
        """How often a slot found the device's memory too small."""
        self._cancels: list[_Cancelling] = []
        self._out: list[Instruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ModelSpec: self._on_load,
            UnloadModelMsg: self._on_unload,
            ModelBuiltEvent: lambda event: self._send(CONTROLLER, ModelReadyMsg(event.model, self.role)),
            CallMsg: self._on_call,
            TaskMsg: self._on_task,
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
            OutOfMemoryEvent: self._on_out_of_memory,
            FenceMsg: self._on_fence,
            ForgetMsg: lambda msg: self._out.append(Forget(msg.segments)),
            AdoptMsg: lambda msg: self._out.append(Adopt(msg.owner)),
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
        self._unloaded.discard(msg.model)
        self._out.append(BuildModel(msg))
        for early in self._early.pop(msg.model, ()):
            self._on_data(early)

    def _on_unload(self, msg: UnloadModelMsg) -> None:
        tables: tuple[dict[int, Any], ...] = (self._models, self._buffers, self._data, self._newest_call)
        for table in tables:
            table.pop(msg.model, None)
        self._early.pop(msg.model, None)
        self._unloaded.add(msg.model)
        self._weights = {key: found for key, found in self._weights.items() if key[0] != msg.model}
        self._scales.pop(msg.model, None)
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
            if msg.model not in self._unloaded:
                self._early.setdefault(msg.model, []).append(msg)
            return
        # the first one stays: what a redone slot publishes again is the same
        if msg.key[0] == "buffer":
            self._buffers[msg.model].setdefault(msg.key, msg.payload)
        elif self._may_read(msg.model, msg.key):
            self._data[msg.model].setdefault(msg.key, msg.payload)

    def _on_weights(self, msg: WeightsReadyMsg) -> None:
        scales = self._scales.setdefault(msg.model, {})
        scales.setdefault(msg.version, msg.loss_scale)
        for old in [version for version in scales if version < msg.version - 2]:
            del scales[old]
        for unit, extent in msg.units:
            versions = self._weights.setdefault((msg.model, unit), {})
            versions[msg.version] = extent
            for old in [version for version in versions if version < msg.version - 2]:
                del versions[old]

    # --- running

    def _on_task(self, msg: TaskMsg) -> None:
        insort(self._queue, msg.task, key=lambda task: task.slot)

    def _advance(self) -> None:
        self._stage_next()
        if self._busy is not None:
            self._prefetch()
            return
        if self._queue and self._queue[0].slot in self._staged and self._is_next(self._queue[0].slot):
            self._start(self._queue.pop(0))
        if not self._running:
            return
        slot = self._running[0]
        progress = self._open[slot]
        task = progress.task
        if progress.next_index == len(task.microbatches):
            self._running.remove(slot)
            self._busy = slot
            self._out.append(FinishSlot(task))
            return
        microbatch = task.microbatches[progress.next_index]
        inputs, scale = self._inputs(task, microbatch), self._loss_scale(task)
        if inputs is not None and scale is not None:
            progress.next_index += 1
            self._busy = slot
            self._prefetch()
            self._out.append(RunMicrobatch(task, self._calls[task.call], microbatch, inputs, scale))

    def _prefetch(self) -> None:
        """Inputs of the micro-batch after the one being launched; an event that has not come is looked for again."""
        if not self._running:
            return
        progress = self._open[self._running[0]]
        if progress.next_index < len(progress.task.microbatches):
            task, microbatch = progress.task, progress.task.microbatches[progress.next_index]
        elif self._queue and self._queue[0].slot in self._staged and self._queue[0].microbatches:
            task, microbatch = self._queue[0], self._queue[0].microbatches[0]
        else:
            return
        if self._prefetched.get(task.slot) == microbatch:
            return
        held = self._data[task.model]
        inputs = {key: held[key] for key in self._keys_read(task, microbatch) if key in held}
        if len(inputs) < sum(key[0] != "buffer" for key in self._keys_read(task, microbatch)):
            return
        if task.kind == "backward" and self._models[task.model].recompute == "layer":  # layer by layer, deepest first
            inputs = {key: payload for key, payload in inputs.items() if key[3] >= task.layers[1] - 1}
        self._prefetched[task.slot] = microbatch
        self._out.append(Prefetch(task, microbatch, inputs))

    def _is_next(self, slot: int) -> bool:
        return not self._running or slot < self._running[0]

    def _start(self, task: SlotTask) -> None:
        self._open[task.slot] = _Progress(task)
        insort(self._running, task.slot)
        self._stage_next()

    def _stage_next(self) -> None:
        if self._recovering:
            if self._dropping:
                return
            self._recovering = False
            self._out.append(FreeCaches())
        for task in self._queue[:STAGED_SLOTS]:
            if task.slot in self._staged:
                continue
            units = self._units_of(task)
            if units is None:
                return
            if len(self._staged) >= STAGED_SLOTS:
                if task is not self._queue[0]:
                    return
                self._evict()
                if len(self._staged) >= STAGED_SLOTS and len(self._running) > 1 and self._running[-1] > task.slot:
                    self._put_back(self._running[-1])
                if len(self._staged) >= STAGED_SLOTS:
                    return
            self._staged.append(task.slot)
            self._out.append(StageWeights(task, units, self._short[task.slot] > 1))

    def _evict(self) -> None:
        """Drop weights that were staged for slots that have not started."""
        for task in [task for task in self._queue if task.slot in self._staged]:
            self._staged.remove(task.slot)
            self._drop(task)

    def _units_of(self, task: SlotTask) -> dict[int, Extent] | None:
        units = {}
        everything = range(len(self._models[task.model].units)) if self._blocking else ()
        if any(task.version not in self._weights.get((task.model, unit), {}) for unit in everything):
            return None
        for position in range(*task.layers):
            for unit in self._models[task.model].layers[position].units:
                extent = self._weights.get((task.model, unit), {}).get(task.version)
                if extent is None:
                    return None
                units[unit] = extent
        return units

    def _loss_scale(self, task: SlotTask) -> float | None:
        """What a slot multiplies its losses by: that of the version that it reads, whoever runs it, however often.

        None: it is not known yet.
        """
        if task.kind != "fused":
            return 1.0
        scale = self._calls[task.call].loss_scale
        return self._scales.get(task.model, {}).get(task.version) if scale is None else scale

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
        self._announced.setdefault(event.slot, []).extend(event.own)
        msg = DataReadyMsg(progress.task.model, event.key, event.payload, event.slot)
        for role in dict.fromkeys((*self._readers(progress.task, event.key), CONTROLLER)):
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
                return (*self._peers, OPTIMIZER)  # which keeps those of a step
            return tuple(dict.fromkeys((self.role, *task.buffer_to)))
        assert key[0] == "out"
        return ()

    def _on_loss(self, event: LossEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is not None:
            self._send(CONTROLLER, LossReadyMsg(progress.task.call, event.microbatch, event.loss, event.metrics))

    def _on_slab(self, event: SlabEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is None:
            return
        task = progress.task
        self._announced.setdefault(event.slot, []).extend(part.extent for part in event.parts)
        msg = SlabReadyMsg(task.model, task.call, task.slot, event.position, event.parts)
        self._send(OPTIMIZER, msg)
        self._send(CONTROLLER, msg)

    def _on_done(self, event: SlotDoneEvent) -> None:
        progress = self._open.pop(event.slot, None)
        if progress is None:
            return
        self._staged.remove(event.slot)
        self._prefetched.pop(event.slot, None)
        tries = self._short[event.slot] + 1
        self._forget_if_over(event.slot)
        self._send(CONTROLLER, SlotCommittedMsg(event.slot, self.role, event.spans, event.peak_bytes, tries))

    # --- failures and cancels

    def _on_failed(self, event: SlotFailedEvent) -> None:
        progress = self._open.get(event.slot)
        if progress is None:  # cancelled while it ran
            self._busy = None
            return
        progress.failed = True
        self._send(CONTROLLER, SlotFailedMsg(event.slot, progress.task.call, self.role, event.error))
        # stays current and busy, so nothing of this worker's queue runs before the controller's cancel

    def _on_out_of_memory(self, event: OutOfMemoryEvent) -> None:
        """Try the slot again, then once more in as little memory as possible; what it has published stands."""
        progress = self._open.get(event.slot)
        if progress is None:
            self._busy = None
            return
        self._short[event.slot] += 1
        if self._short[event.slot] > MAX_TRIES - 1:
            self._on_failed(SlotFailedEvent(event.slot, event.error))
            return
        self._busy = None
        for slot in {event.slot, *self._running}:  # one that was handing over its gradients runs no more
            self._put_back(slot)
        self._evict()
        self._recovering = True

    def _put_back(self, slot: int) -> None:
        """A slot that has started, and is not being launched right now, will run again from its start."""
        if slot == self._busy:
            return
        task = self._open.pop(slot).task
        self._running = [other for other in self._running if other != slot]
        self._staged.remove(slot)
        self._drop(task)
        insort(self._queue, task, key=lambda task: task.slot)

    def _drop(self, task: SlotTask) -> None:
        self._dropping[task.slot] += 1
        self._prefetched.pop(task.slot, None)
        self._out.append(DropSlot(task))

    def _on_cancel(self, msg: CancelMsg) -> None:
        gone = {
            number
            for number, call in self._calls.items()
            if call.model == msg.model and msg.first_call <= number <= msg.last_call
        }
        slots = set()
        for task in [task for task in self._queue if task.call in gone]:
            slots.add(task.slot)
            self._queue.remove(task)
            if task.slot in self._staged:
                self._drop(task)
        for slot, progress in list(self._open.items()):
            if progress.task.call in gone:
                slots.add(slot)
                self._drop(progress.task)
                if progress.failed:
                    self._busy = None
                del self._open[slot]
        self._running = [slot for slot in self._running if slot not in slots]
        self._staged = [slot for slot in self._staged if slot not in slots]
        data = self._data.get(msg.model, {})
        for key in [key for key in data if key[1] in gone]:
            del data[key]
        for number in gone:
            del self._calls[number]
        extents: list[Extent] = []
        for slot in slots:
            extents += self._announced.pop(slot, [])
            del self._short[slot]
        self._cancels.append(_Cancelling(msg, slots, extents))
        self._answer_cancels()

    def _on_dropped(self, event: SlotDroppedEvent) -> None:
        self._dropping[event.slot] -= 1
        if not self._dropping[event.slot]:
            del self._dropping[event.slot]
        cancel = next((cancel for cancel in self._cancels if event.slot in cancel.slots), None)
        if cancel is not None:
            cancel.extents += event.own
        else:  # to be run again: what peers know of belongs to the slot
            known = self._announced.get(event.slot, [])
            unknown = tuple(extent for extent in event.own if extent not in known)
            if unknown:
                self._out.append(FreeOwn(unknown))
            self._forget_if_over(event.slot)
        self._answer_cancels()

    def _forget_if_over(self, slot: int) -> None:
        """A slot that was run again may commit before the stage of its first try is dropped."""
        queued = any(task.slot == slot for task in self._queue)
        if slot not in self._open and slot not in self._dropping and not queued:
            self._announced.pop(slot, None)
            del self._short[slot]

    def _answer_cancels(self) -> None:
        for cancel in list(self._cancels):
            if not any(slot in self._dropping for slot in cancel.slots):
                self._cancels.remove(cancel)
                extents = tuple(dict.fromkeys(cancel.extents))
                self._send(CONTROLLER, CancelledMsg(cancel.msg.model, cancel.msg.first_call, self.role, extents))

    def _on_fence(self, msg: FenceMsg) -> None:
        """The mailbox has begun to drop what an older process of the role sends."""
        if msg.retired:
            self._peers = tuple(role for role in self._peers if role != msg.role)
        self._send(CONTROLLER, FencedMsg(msg.role, msg.incarnation, self.role))

    def _send(self, role: str, msg: Any) -> None:
        self._out.append(Send(role, msg))
