"""The optimizer around its machine: receives, carries instructions out, reports back. It decides nothing."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rpruntime.errors import HostMemoryError
from rpruntime.optimizer import events as ev
from rpruntime.optimizer.kept import Kept, copied, put_struct
from rpruntime.optimizer.machine import OptimizerMachine
from rpruntime.optimizer.norms import Norms, in_windows
from rpruntime.optimizer.outbox import CONTROLLER
from rpruntime.optimizer.pieces import Scratch
from rpruntime.optimizer.snapshots import PREVIOUS, WEIGHT, Copies, Incoming, Row, parts_of
from rpruntime.optimizer.tracing import OptimizerTrace
from rpruntime.optimizer.units import Unit, revive_optimizer, write_params
from rpruntime.recording import record
from rpruntime.status import NullStatus, StatusWriter
from rpruntime.store.arena import Arena
from rpruntime.store.handle import Extent
from rpruntime.store.layout import optimizer_layout, spare_bytes
from rpruntime.store.relocate import extents_in
from rpruntime.store.values import put_together
from rpruntime.wire.codec import unpack_struct
from rpruntime.wire.mailbox import Post
from rpruntime.wire.messages import (
    LoadModelMsg,
    ModelAllocatedMsg,
    ModelReadyMsg,
    ModelSpec,
    RoleFailedMsg,
    StateMsg,
    TraceMsg,
    UnitSpec,
    UnloadModelMsg,
)
from rpruntime.wire.succession import ModelRow, ModelsMsg, ModelState
from rpruntime.worker.failures import describe

log = logging.getLogger(__name__)


class _Model:
    """The slabs and units of one model. `units[i]` is None for a frozen unit."""

    def __init__(self, msg: ModelSpec, arena: Arena, scratch: Scratch) -> None:
        self.msg = msg
        lent = msg.lent or (None,) * len(msg.units)
        own = sum(unit.nbytes for unit, extent in zip(msg.units, lent, strict=True) if extent is None)
        _make_room(arena, own)
        self.lent = {dataclasses.replace(extent, owner=arena.owner) for extent in lent if extent is not None}
        """First versions that lie in the controller's memory; they become the arena's when they are freed."""
        self.master = [
            arena.allocate(unit.nbytes) if extent is None else dataclasses.replace(extent, owner=arena.owner)
            for unit, extent in zip(msg.units, lent, strict=True)
        ]
        """The newest version of each unit."""
        self.slabs: set[Extent] = set(self.master) - self.lent
        """All versions that nobody has freed."""
        _make_room(arena, sum(optimizer_layout(unit)[1] for unit in msg.units if unit.trainable))
        self.units: list[Unit | None] = [Unit(unit, arena, scratch) if unit.trainable else None for unit in msg.units]
        self.copies = Copies(arena)
        self.kept = Kept(msg, arena)
        self.incoming: dict[int, Incoming] = {}
        """Units whose values are coming in."""


def _make_room(arena: Arena, nbytes: int) -> None:
    """Reserve what is going to be allocated at once, and not an eighth more; what an earlier model has left counts."""
    if nbytes > arena.total_bytes - arena.live_bytes:
        arena.reserve(nbytes)


class OptimizerShell:
    """The optimizer process's work, whatever carries its messages. `status` is None in the script's own process."""

    def __init__(
        self, post: Post, arena: Arena, workers: tuple[str, ...], *, status: StatusWriter | None = None
    ) -> None:
        self._status = NullStatus() if status is None else status
        self._failure_level = logging.DEBUG if status is None else logging.ERROR
        """Inline there is no log but the script's, and the script gets the exception."""
        self._post = post
        self._arena = arena
        self._store = arena.store
        self._machine = OptimizerMachine(workers)
        record(self._machine, post.role)
        self._models: dict[int, _Model] = {}
        self._told: set[Extent] = set()
        """What was allocated for a controller to read and free."""
        self._scratch = Scratch()
        self._started: dict[tuple[int, int], float] = {}
        self._todo: deque[Any] = deque()
        self._trace = OptimizerTrace()
        self._carry_out: dict[type, Callable[[Any], Any]] = {
            ev.Send: lambda i: self._post.send(i.role, i.msg),
            ev.BuildModel: self._build,
            ev.FillModel: self._fill,
            ev.ForgetModel: self._forget,
            ev.AddSlab: lambda i: self._unit(i.model, i.part.unit).add(i.iteration, i.part),
            ev.DropSums: self._drop_sums,
            ev.MeasureNorm: self._measure_norm,
            ev.StepUnit: self._step_unit,
            ev.ReadState: self._read_state,
            ev.CopyUnit: self._copy_unit,
            ev.FreeCopies: lambda i: self._models[i.model].copies.free(i.save, i.unit),
            ev.RestoreUnit: self._restore_unit,
            ev.KeepBuffers: self._keep_buffers,
            ev.TakeHead: lambda i: self._models[i.model].kept.take_head(),
            ev.KeepOnly: self._keep_only,
            ev.TellModels: self._tell_models,
            ev.StartClock: lambda i: self._started.__setitem__((i.model, i.step), time.monotonic()),
            ev.FinishStep: self._finish_step,
            ev.FreeOwn: self._free,
            ev.Forget: lambda i: self._store.forget_all(i.segments),
        }

    def step(self, messages: list[Any]) -> bool:
        """Take messages in and carry out one instruction; True: there is more to do."""
        began = time.monotonic()
        for msg in messages:
            if isinstance(msg, TraceMsg):
                self._trace.switch(msg.on)
            if isinstance(msg, LoadModelMsg):
                msg = unpack_struct(bytes(self._store.tensor(msg.spec).numpy()))
            if self._machine.understands(msg):
                instructions = self._machine.handle(msg)
                # at once, though units wait to be stepped: their new weights take the room of old ones
                for freed in (found for found in instructions if isinstance(found, ev.FreeOwn)):
                    self._try(freed)
                self._todo.extend(found for found in instructions if not isinstance(found, ev.FreeOwn))
        if messages and self._trace.on:
            self._trace.took(len(messages), began, time.monotonic())
        if self._todo:
            self._try(self._todo.popleft())
        return bool(self._todo)

    def _try(self, instruction: Any) -> None:
        try:
            self._carry_out_now(instruction)
        except Exception as err:
            log.log(self._failure_level, "carrying out %s", type(instruction).__name__, exc_info=err)
            error, model = describe(err, phase="step", device=self._post.role), _model_of(instruction)
            self._post.send(CONTROLLER, RoleFailedMsg(self._post.role, model, error))
            if not isinstance(instruction, ev.ReadState):  # which changes nothing: another program can go on
                self._give_up(model, f"{error.type_name}: {error.text}")
        self._status.progress()

    def _give_up(self, model: int, reason: str) -> None:
        """Nothing that would use or change a model's weights and gradients is done any more."""
        self._todo = deque(i for i in self._todo if not (isinstance(i, ev.WORK) and i.model == model))
        self._happened(ev.WorkFailedEvent(model, reason))

    def _carry_out_now(self, instruction: Any) -> None:
        began = time.monotonic()
        self._carry_out[type(instruction)](instruction)
        if self._trace.on:
            model = self._models.get(_model_of(instruction))
            spec = None if model is None else model.msg
            self._trace.carried_out(instruction, spec, began, time.monotonic())

    def _send_trace(self) -> None:
        for msg in self._trace.take(self._post.role):
            self._post.send(CONTROLLER, msg)

    def _happened(self, event: Any) -> None:
        """What an instruction has led to: messages that come first (a published unit is awaited) go out at once, the
        rest waits behind what is queued already, in order."""
        following = deque(self._machine.handle(event))
        while following and isinstance(following[0], ev.Send):
            self._carry_out[ev.Send](following.popleft())
        self._todo.extend(following)

    def _unit(self, model: int, unit: int) -> Unit:
        found = self._models[model].units[unit]
        assert found is not None
        return found

    # --- models

    def _build(self, instruction: ev.BuildModel) -> None:
        msg = instruction.msg
        sys.path.extend(path for path in msg.python_path if path not in sys.path)
        try:
            with self._arena.all_or_nothing():
                model = _Model(msg, self._arena, self._scratch)
        except Exception as err:
            log.log(self._failure_level, "allocating model %s", msg.name, exc_info=err)
            self._post.send(CONTROLLER, RoleFailedMsg(self._post.role, msg.model, describe(err, phase="load")))
            return
        self._models[msg.model] = model
        optim = tuple(None if unit is None else unit.extent for unit in model.units)
        self._post.send(CONTROLLER, ModelAllocatedMsg(msg.model, tuple(model.master), optim))

    def _fill(self, instruction: ev.FillModel) -> None:
        model = self._models[instruction.model]
        msg = model.msg
        if msg.optimizer is not None:
            tensors = [self._optimizer_tensor(model, entry) for entry in msg.optimizer.tensors]
            data = bytes(self._store.tensor(msg.optimizer.data).numpy())
            whole = revive_optimizer(*put_together(data, tensors))
            units = [unit for unit in model.units if unit is not None]
            for unit in units:
                unit.adopt_optimizer(whole)
            _make_room(self._arena, sum(unit.state_bytes() for unit in units))
            for unit in units:
                unit.place_state()
                self._status.progress()
            # last, so that nothing of the above lies there
            _make_room(self._arena, spare_bytes(msg.units, msg.asynchronous))
        self._happened(ev.ModelFilledEvent(instruction.model, tuple(model.master)))
        self._post.send(CONTROLLER, ModelReadyMsg(instruction.model, self._post.role))

    def _optimizer_tensor(self, model: _Model, entry: tuple[Any, ...]) -> torch.Tensor:
        if entry[0] == "param":
            unit = model.units[entry[1]]
            if unit is None:  # a frozen parameter that stands in a group: never stepped
                return torch.nn.Parameter(torch.empty(0), requires_grad=False)
            return unit.params[entry[2]]
        return self._store.tensor(entry[1]).clone()

    def _forget(self, instruction: ev.ForgetModel) -> None:
        model = self._models.pop(instruction.model, None)
        if model is None:
            return
        for unit in model.units:
            if unit is not None:
                unit.free()
        model.copies.free_all()
        model.kept.free()
        for extent in model.slabs:
            self._arena.free(extent)
        for extent in model.lent.difference(model.master):  # a newest version is the controller's again
            self._arena.take(extent)

    # --- work

    def _free(self, instruction: ev.FreeOwn) -> None:
        for extent in instruction.extents:
            lender = next((model for model in self._models.values() if extent in model.lent), None)
            if lender is not None:
                lender.lent.discard(extent)
                self._arena.take(extent)
                continue
            self._arena.free(extent)
            self._told.discard(extent)
            for model in self._models.values():
                model.slabs.discard(extent)

    def _drop_sums(self, instruction: ev.DropSums) -> None:
        for unit in self._models[instruction.model].units:
            if unit is not None:
                unit.drop_sum(instruction.iteration)

    def _measure_norm(self, instruction: ev.MeasureNorm) -> None:
        units = [unit for unit in self._models[instruction.model].units if unit is not None]
        norms: list[torch.Tensor] = []
        with Norms() as pool:
            for several in in_windows(units, [unit.wide_bytes for unit in units]):
                gradients: list[torch.Tensor | None] = []
                rooms = self._scratch.take(sum(unit.wide_bytes for unit in several))
                for unit, room in zip(several, rooms.split([unit.wide_bytes for unit in several]), strict=True):
                    gradients += unit.gradients(instruction.iteration, instruction.inverse, room)
                norms += pool.measure(gradients)
                self._status.progress()
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        single, value = norm.dtype == torch.float32, norm.item()
        finite = math.isfinite(value) or all(g.isfinite().all() for g in self._gradients(instruction, 1.0))
        self._happened(ev.NormEvent(instruction.model, instruction.iteration, value, single, finite))

    def _gradients(self, instruction: ev.MeasureNorm, inverse: float) -> Iterator[torch.Tensor]:
        """All gradients of an iteration; each is void when the next unit's come."""
        for unit in self._models[instruction.model].units:
            if unit is not None:
                for gradient in unit.gradients(instruction.iteration, inverse):
                    if gradient is not None:
                        yield gradient

    def _step_unit(self, instruction: ev.StepUnit) -> None:
        model = self._models[instruction.model]
        unit = self._unit(instruction.model, instruction.unit)
        extent = unit.step(instruction.step, instruction.groups, instruction.inverse, instruction.gradient_factor)
        if extent is not None:
            model.master[instruction.unit] = extent
            model.slabs.add(extent)
        self._happened(
            ev.UnitSteppedEvent(instruction.model, instruction.step, instruction.unit, model.master[instruction.unit])
        )

    def _finish_step(self, instruction: ev.FinishStep) -> None:
        started = self._started.pop((instruction.msg.model, instruction.msg.step))
        msg = dataclasses.replace(instruction.msg, seconds=time.monotonic() - started)
        self._send_trace()
        self._post.send(CONTROLLER, msg)

    def _read_state(self, instruction: ev.ReadState) -> None:
        msg = instruction.msg
        rows: list[Row] = []
        for unit in self._models[msg.model].units:
            if unit is None:
                continue
            number = unit.spec.index
            if msg.what == "gradients":
                found = unit.gradients(instruction.iteration, instruction.inverse)
                # the next unit's may lie in the same scratch
                rows += [(number, i, "gradient", g.clone()) for i, g in enumerate(found) if g is not None]
            else:
                rows += [(number, *row) for row in unit.state_rows()]
        for fields in parts_of(rows, self._allocate_told, self._arena):
            self._post.send(CONTROLLER, StateMsg(msg.model, msg.request, msg.what, **fields))
            self._status.progress()

    def _allocate_told(self, nbytes: int) -> Extent:
        extent = self._arena.allocate(nbytes)
        self._told.add(extent)
        return extent

    # --- what outlives a controller (docs/client.md)

    def _keep_buffers(self, instruction: ev.KeepBuffers) -> None:
        kept = self._models[instruction.model].kept
        (kept.keep_head if instruction.head else kept.keep)(instruction.buffers)

    def _keep_only(self, instruction: ev.KeepOnly) -> None:
        lost: list[int] = []
        for number, model in self._models.items():
            stays = set(instruction.versions[number])
            for extent in model.lent:  # the controller's memory goes, but for these
                self._arena.take(extent, live=extent in stays)
            model.slabs |= model.lent & stays
            model.lent = set()
            self._arena.free_all(model.slabs - stays)
            model.slabs &= stays
            for unit in model.units:
                if unit is not None:
                    unit.drop_sums(but=instruction.iterations.get(number))
            model.copies.free_all()
            model.incoming.clear()
            try:
                model.kept.settle(with_head=number in instruction.iterations)
            except HostMemoryError as err:
                log.error("model %s cannot be kept for another program: %s", model.msg.name, err)
                lost.append(number)
        self._arena.free_all(self._told)
        self._told.clear()
        self._arena.settle()
        for number in lost:
            self._happened(UnloadModelMsg(number))

    def _tell_models(self, instruction: ev.TellModels) -> None:
        try:
            with self._arena.all_or_nothing():
                rows = self._rows_told(instruction)
        except HostMemoryError as err:
            self._post.send(instruction.msg.role, ModelsMsg((), describe(err, device=self._post.role)))
            return
        self._told.update(extents_in(tuple((row.state, state.buffers, state.head) for row, state in rows)))
        self._post.send(instruction.msg.role, ModelsMsg(tuple(row for row, _ in rows)))

    def _rows_told(self, instruction: ev.TellModels) -> list[tuple[ModelRow, ModelState]]:
        rows = []
        for row, state in instruction.rows:
            kept = self._models[row.model].kept
            if instruction.msg.whole and kept.package is not None:
                told = {"buffers": copied(kept.buffers, self._arena), "head": copied(kept.head, self._arena)}
                state = dataclasses.replace(state, spec=kept.package, **told)
                row = dataclasses.replace(row, state=put_struct(state, self._arena))
            rows.append((row, state))
        return rows

    # --- checkpoints

    def _copy_unit(self, instruction: ev.CopyUnit) -> None:
        model, save, number = instruction.model, instruction.save, instruction.unit
        try:
            messages, nbytes = self._models[model].copies.copy(model, save, self._unit(model, number))
        except Exception as err:
            log.exception("copying unit %d for a checkpoint", number)
            self._happened(ev.CopyFailedEvent(model, save, f"{type(err).__name__}: {err}"))
            return
        for msg in messages:
            self._post.send(CONTROLLER, msg)
        self._happened(ev.UnitCopiedEvent(model, save, number, nbytes))

    def _restore_unit(self, instruction: ev.RestoreUnit) -> None:
        msg = instruction.msg
        model = self._models[msg.model]
        incoming = model.incoming.setdefault(msg.unit, Incoming())
        incoming.add(msg, self._arena)
        if not msg.last:
            return
        del model.incoming[msg.unit]
        unit, spec = model.units[msg.unit], model.msg.units[msg.unit]
        newest = previous = model.master[msg.unit]
        weights, before = incoming.named(self._arena, WEIGHT), incoming.named(self._arena, PREVIOUS)
        if unit is not None:
            state = (incoming.state(self._arena), incoming.groups()) if msg.whole else (None, None)
            unit.restore(weights, *state)
        if weights:
            newest = self._new_master(model, spec)
            if unit is not None:
                unit.write_master(newest)
            else:
                write_params(self._store.bytes_of(newest), spec, weights)
            previous = newest
        if before:
            previous = self._new_master(model, spec)
            write_params(self._store.bytes_of(previous), spec, before)
        model.master[msg.unit] = newest
        done = ev.UnitRestoredEvent(
            msg.model, msg.request, msg.unit, newest, previous if instruction.previous else None
        )
        self._happened(done)

    def _new_master(self, model: _Model, spec: UnitSpec) -> Extent:
        extent = self._arena.allocate(spec.nbytes)
        model.slabs.add(extent)
        return extent


def _model_of(instruction: Any) -> int:
    """The model that an instruction is about; -1: none."""
    about = instruction if hasattr(instruction, "model") else getattr(instruction, "msg", None)
    return int(getattr(about, "model", -1))
