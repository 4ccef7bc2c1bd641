"""The worker around its machine: receives, carries instructions out, reports back. It decides nothing."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rpruntime.recording import record
from rpruntime.status import NullStatus, StatusWriter
from rpruntime.store.arena import GRADIENTS, Arena
from rpruntime.store.handle import TensorHandle
from rpruntime.trace.spans import MESSAGES
from rpruntime.wire.codec import unpack_struct
from rpruntime.wire.mailbox import Post
from rpruntime.wire.messages import ForgetMsg, LoadModelMsg, ModelSpec, RoleFailedMsg, SlotTask, TraceMsg
from rpruntime.worker import events as ev
from rpruntime.worker.copies import CopyLog
from rpruntime.worker.failures import describe
from rpruntime.worker.machine import CONTROLLER, OPTIMIZER, WorkerMachine
from rpruntime.worker.memory import forget_frames, free_caches, is_out_of_memory
from rpruntime.worker.modules import WorkerModel, read_bytes
from rpruntime.worker.rehearsal import Notebook
from rpruntime.worker.stage import Stage
from rpruntime.worker.transfers import Transfers, transfers_mode, variant
from rpruntime.worker.windows import USUAL_SIZES, Windows, WindowSizes

log = logging.getLogger(__name__)

CONSISTENCY_VARIABLE = "RPRUNTIME_CONSISTENCY"
"""For measurements: "layerwise" (the default) or "blocking" (a slot waits for the whole model's new version)."""

MAX_LAUNCHED = 2
"""Micro-batches that may be launched and not finished: enough to hide launching, few enough to bound memory."""


class WorkerShell:
    """One worker: its machine, its models and the stages under way.

    Args:
        post: its mailbox.
        arena: its own memory.
        transfers: copies to and from its device.
        peers: all workers' roles.
        device_name: for error messages, "cuda:1".
        status: what it is doing, for its launcher.
        sizes: how weights and gradients are spread over micro-batches.
        notebook: what its replacement, if there is ever one, is to rehearse.
    """

    def __init__(
        self,
        post: Post,
        arena: Arena,
        transfers: Transfers,
        peers: tuple[str, ...],
        device_name: str,
        status: StatusWriter | None = None,
        sizes: WindowSizes = USUAL_SIZES,
        notebook: Notebook | None = None,
    ) -> None:
        self._sizes = sizes
        self._notebook = notebook or Notebook(None)
        self._inline = status is None
        """Whether this is the script's own process, whose user sees for himself what hangs and who is interrupted."""
        self._failure_level = logging.DEBUG if self._inline else logging.ERROR
        """Inline there is no log but the script's, and the script gets the exception."""
        self._status = NullStatus() if status is None else status
        self._post = post
        self._arena = arena
        self._transfers = transfers
        self._device_name = device_name
        self._log = transfers.log = CopyLog(self._status)
        blocking = variant(CONSISTENCY_VARIABLE, "layerwise", "blocking") == "blocking"
        self._machine = WorkerMachine(post.role, peers, blocking=blocking)
        self._peers = peers
        self._replaces = not arena.owner.endswith(".1")
        """Whether this process took the place of one that died."""
        record(self._machine, arena.owner if self._replaces else post.role)
        self._models: dict[int, WorkerModel] = {}
        self._handles: dict[int, TensorHandle] = {}
        """Where the specs lie of models that are to be built."""
        self._stages: dict[int, Stage] = {}
        self._in_windows = transfers_mode() == "windows"
        self._up: dict[int, Windows] = {}
        """Weights of staged slots that have not started, on their way to the device."""
        self._down: Windows | None = None
        """Gradients of the last slot, on their way to the host."""
        self._left = 0
        """Micro-batches of the running slot that are not launched."""
        self._finishing: list[Stage] = []
        self._dropping: list[Stage] = []
        self._ahead: deque[Any] = deque()
        """Marks at the ends of launched micro-batches that the device has not reached."""
        self._launched = False
        """Whether the machine waits for the `LaunchedEvent` of work that has been launched."""
        self._handed_over: set[int] = set()
        """Finishing slots of whose gradients some are in host memory."""
        self._events: deque[Any] = deque()
        self._carry_out: dict[type, Callable[[Any], Any]] = {
            ev.Send: lambda i: self._post.send(i.role, i.msg),
            ev.BuildModel: lambda i: self._build(i.msg),
            ev.ForgetModel: self._forget,
            ev.StageWeights: self._stage_weights,
            ev.Prefetch: self._prefetch,
            ev.RunMicrobatch: self._run,
            ev.FinishSlot: self._finish,
            ev.DropSlot: self._drop,
            ev.FreeOwn: lambda i: self._arena.free_all(i.extents),
            ev.FreeCaches: lambda i: free_caches(self._transfers.device),
            ev.Adopt: self._adopt,
            ev.Forget: lambda i: self._arena.store.forget_all(i.segments),
        }

    @property
    def is_waiting_for_copies(self) -> bool:
        """Whether a copy is under way or may start when the device comes to rest: it is worth while to look soon."""
        waiting = self._launched or self._ahead or self._finishing or self._dropping
        return bool(waiting) or any(stage.publications for stage in self._stages.values())

    def step(self, messages: list[Any]) -> bool:
        """Take messages in and do what is to be done now; at most one micro-batch. True: something was done."""
        began = time.monotonic()
        self._collect()
        # what happened here comes first: a slot that has ended must not be dropped by a cancel that came after
        events = [*self._events, *(msg for msg in map(self._opened, messages) if self._machine.understands(msg))]
        self._events.clear()
        self._tell_slots()
        instructions = self._machine.handle(*events)
        self._trace(messages, began)
        if instructions:
            self._status.set_busy(True)
        for instruction in instructions:
            self._carry_out[type(instruction)](instruction)
        if not self._launched and not self._ahead:
            self._open_all()
        self._status.set_busy(self.is_waiting_for_copies or bool(self._events))
        self._tell_slots()
        return bool(events or instructions)

    def _trace(self, messages: list[Any], began: float) -> None:
        for msg in messages:
            if isinstance(msg, TraceMsg):
                self._log.switch(msg.on)
        if messages and self._log.on:
            times = began * 1e3, time.monotonic() * 1e3
            self._log.spans.add(MESSAGES, f"{len(messages)} messages", *times)

    def _send_trace(self) -> None:
        """Before a slot's end is told: who reads the trace knows of the slot until then."""
        if self._log.on:
            self._log.settle(self._transfers)
            for msg in self._log.spans.take(self._post.role):
                self._post.send(CONTROLLER, msg)

    def _place(self, task: SlotTask, microbatch: int = -1) -> None:
        """What is copied from now on belongs here."""
        self._log.place = (task.slot, *task.layers, microbatch)

    def _tell_slots(self) -> None:
        """A slot that has begun to hand over its gradients is not blamed for what happens next: its code has run."""
        finishing = [stage.task.slot for stage in self._finishing if stage.task.slot not in self._handed_over]
        self._status.finishing(min(finishing, default=0))
        if not self._launched and not self._ahead:
            self._status.at(0)

    def _opened(self, msg: Any) -> Any:
        if isinstance(msg, LoadModelMsg):
            spec = unpack_struct(read_bytes(self._arena.store, msg.spec))
            self._handles[spec.model] = msg.spec
            return spec
        return msg

    def _collect(self) -> None:
        reached = self._transfers.reached
        while self._ahead and self._transfers.reached(self._ahead[0]):
            self._ahead.popleft()
        if self._launched and len(self._ahead) < MAX_LAUNCHED:
            self._launched = False
            self._status.progress()
            self._events.append(ev.LaunchedEvent())
        for stage in [*self._stages.values(), *self._finishing]:
            published = stage.take_published()
            if any(isinstance(event, ev.SlabEvent) for event in published):
                self._handed_over.add(stage.task.slot)
            self._events.extend(published)
        for stage in [stage for stage in self._finishing if not stage.publications and reached(stage.end)]:
            self._finishing.remove(stage)
            self._handed_over.discard(stage.task.slot)
            self._send_trace()
            self._events.append(ev.SlotDoneEvent(stage.task.slot, stage.spans(), self._transfers.peak_bytes()))
        for stage in self._dropping:
            stage.take_published()
        gone = [s for s in self._dropping if not s.publications and s.has_arrived() and reached(s.end)]
        for stage in gone:
            self._dropping.remove(stage)
            stage.release()
            self._events.append(ev.SlotDroppedEvent(stage.task.slot, tuple(stage.own)))

    def _build(self, msg: ModelSpec) -> None:
        sys.path.extend(path for path in msg.python_path if path not in sys.path)
        try:
            # a replacement grows as it must: it will adopt what its predecessor had
            missing = msg.worker_bytes - self._arena.bytes_for(GRADIENTS)
            if missing > 0 and not self._replaces:
                self._arena.reserve(missing, GRADIENTS)
            self._models[msg.model] = WorkerModel(msg, self._arena.store, self._transfers.device)
        except Exception as err:
            if self._replaces:
                raise  # others go on without this process
            log.log(self._failure_level, "building model %s", msg.name, exc_info=err)
            self._post.send(CONTROLLER, RoleFailedMsg(self._post.role, msg.model, describe(err, phase="load")))
            return
        self._notebook.add_model(msg, self._handles.pop(msg.model))
        self._events.append(ev.ModelBuiltEvent(msg.model))

    def _forget(self, instruction: ev.ForgetModel) -> None:
        self._models.pop(instruction.model, None)
        self._notebook.forget_model(instruction.model)

    def _adopt(self, instruction: ev.Adopt) -> None:
        limit = sum(model.msg.worker_bytes for model in self._models.values())
        given_up = self._arena.adopt(instruction.owner, limit)
        if given_up:
            for role in (*(peer for peer in self._peers if peer != self._post.role), OPTIMIZER, CONTROLLER):
                self._post.send(role, ForgetMsg(given_up))

    def _stage_weights(self, instruction: ev.StageWeights) -> None:
        task = instruction.task
        stage = Stage(
            task,
            self._models[task.model],
            self._transfers,
            self._arena,
            by_layer=instruction.by_layer,
            status=self._status,
        )
        self._stages[task.slot] = stage
        self._place(task)
        try:
            for unit, extent in instruction.units.items():
                stage.weights[unit] = self._transfers.upload_pieces(self._arena.store.bytes_of(extent))
        except Exception as err:  # out of device memory, as a rule; told when the slot's turn comes
            stage.failure = err
        self._up[task.slot] = Windows(list(stage.weights.values()), self._left if self._in_windows else 0, self._sizes)

    def _prefetch(self, instruction: ev.Prefetch) -> None:
        self._place(instruction.task, instruction.microbatch)
        try:
            self._stages[instruction.task.slot].prefetch(instruction.inputs)
        except Exception as err:  # no room on the device, as a rule; what stays wrong is told by the micro-batch itself
            log.info(
                "micro-batch %s of slot %s cannot be prefetched: %s", instruction.microbatch, instruction.task.slot, err
            )

    @property
    def _crossing(self) -> list[Windows]:
        """What is spread over the micro-batches that are launched."""
        return [*self._up.values(), *([] if self._down is None else [self._down])]

    def _open_windows(self) -> None:
        """The next part of what crosses beside the micro-batch that is launched now."""
        for windows in self._crossing:
            windows.open()

    def _open_all(self) -> None:
        """The device computes nothing that copies could hide behind."""
        for windows in self._crossing:
            windows.finish()

    def _run(self, instruction: ev.RunMicrobatch) -> None:
        stage = self._stages[instruction.task.slot]
        try:
            if stage.failure is not None:
                raise stage.failure
            windows = self._up.pop(instruction.task.slot, None)
            if windows is not None:  # its first micro-batch
                windows.finish()
            microbatches = instruction.task.microbatches
            self._left = len(microbatches) - 1 - microbatches.index(instruction.microbatch)
            self._open_windows()
            self._place(instruction.task, instruction.microbatch)
            stage.run(instruction)
        except BaseException as err:
            self._report(stage, err)
            if isinstance(err, KeyboardInterrupt) and self._inline:  # it is the script's
                raise
        else:
            self._ahead.append(self._transfers.mark())
            self._launched = True
            if not stage.by_layer:
                self._notebook.add(instruction)

    def _finish(self, instruction: ev.FinishSlot) -> None:
        stage = self._stages[instruction.task.slot]
        self._place(instruction.task)
        unused = self._up.pop(stage.task.slot, None)  # of a slot that was done but for this
        for windows in (unused, self._down):
            if windows is not None:
                windows.finish()
        try:
            stage.finish()
        except Exception as err:
            self._report(stage, err)
            self._down = Windows(stage.gradients, 0, self._sizes)  # the stage is dropped when all of them have come
            return
        following = [other.task for other in self._stages.values() if other is not stage]
        num_windows = len(following[0].microbatches) if following and self._in_windows else 0
        self._down = Windows(stage.gradients, num_windows, self._sizes)
        del self._stages[instruction.task.slot]
        self._finishing.append(stage)
        self._launched = True
        self._tell_slots()
        self._status.at(0)

    def _drop(self, instruction: ev.DropSlot) -> None:
        slot = instruction.task.slot
        stage = self._stages.pop(slot, None)
        if stage is None:
            stage = next(stage for stage in self._finishing if stage.task.slot == slot)
            self._finishing.remove(stage)
            self._handed_over.discard(slot)
        self._open_all()  # what has been allocated for has to arrive before it can be freed
        self._up.pop(slot, None)
        stage.drop()
        self._dropping.append(stage)

    def _report(self, stage: Stage, err: BaseException) -> None:
        if not (isinstance(err, KeyboardInterrupt) and self._inline):
            self._transfers.check()  # a device that cannot be used any more ends this process
        short = is_out_of_memory(err)
        if short:
            err = stage.explain(err, self._device_name)
        place = stage.place
        layer = self._models[stage.task.model].msg.layers[place.layer] if place.layer >= 0 else None
        level = logging.WARNING if short else self._failure_level  # what is short is tried again, and not raised yet
        log.log(level, "slot %s failed in %s", stage.task.slot, place, exc_info=err)
        error = describe(
            err,
            phase=place.phase,
            layer=place.layer,
            layer_name="" if layer is None else f"{layer.name} ({layer.class_name})",
            microbatch=place.microbatch,
            device=self._device_name,
        )
        if short:
            forget_frames(err)
            self._events.append(ev.OutOfMemoryEvent(stage.task.slot, error))
        else:
            self._events.append(ev.SlotFailedEvent(stage.task.slot, error))
