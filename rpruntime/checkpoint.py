"""`save_checkpoint` and `load_checkpoint`: the script's side. Files: `rpruntime/checkpoint_files.py`.

save    script: what only it has, pickled now; SaveEvent -> the machine holds master copies and buffers
        optimizer: copies each unit between two steps -> StateMsg
        writer thread: files, unit by unit; at the end the folder gets its name
load    all is checked; RestoreEvent opens an iteration with new versions; units go to the optimizer one by one
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import pickle
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

import rpruntime
from rpruntime.bar import Bar
from rpruntime.buffers import buffers_of
from rpruntime.checkpoint_files import (
    CheckpointReader,
    CheckpointWriter,
    Place,
    explain,
    find_checkpoint,
    prune,
    writing_in,
)
from rpruntime.control import events as ev
from rpruntime.errors import CheckpointError, ConfigError, SessionLost, WorkerDied
from rpruntime.loading import put_tensor
from rpruntime.optimizer.scaling import from_dict
from rpruntime.optimizer.snapshots import PREVIOUS, ROWS_A_MESSAGE, WEIGHT
from rpruntime.store.arena import Store, dtype_of, view
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Extent, Payload, TensorHandle
from rpruntime.store.layout import optimizer_dtype
from rpruntime.store.limits import read_host_memory
from rpruntime.store.values import take_apart, why_not_picklable
from rpruntime.terminal import say, warn
from rpruntime.wire.messages import (
    RestoredMsg,
    RestoreMsg,
    RestoreUnitMsg,
    SnapshotBegunMsg,
    SnapshotFailedMsg,
    SnapshotWrittenMsg,
    StateMsg,
    UnitSpec,
)

if TYPE_CHECKING:
    from rpruntime.model import Model

log = logging.getLogger(__name__)

MIN_ROOM_BYTES = 64 << 20
"""Copies of units may take this much at least, and up to half of what the machine has free."""
SAY_INTERVAL_S = 2.0
CHECK_INTERVAL_S = 0.5
SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class CheckpointInfo:
    """What was loaded: `step`, steps done in the training so far, and the `extra` that it was saved with."""

    step: int
    extra: Any
    path: str = ""


class SaveHandle:
    """A save in the background."""

    def __init__(self, saves: Checkpoints) -> None:
        self._saves = saves
        self._over = threading.Event()
        self._path: Path | None = None
        self._error: CheckpointError | None = None

    def done(self) -> bool:
        """Whether it is complete or has failed."""
        self._saves.work_inline()
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Wait until it is complete; the checkpoint's folder.

        Raises:
            CheckpointError: why it could not be written; training and older checkpoints are as they were.
            TimeoutError: after `timeout` seconds.
        """
        self._saves.work_inline()
        if self._saves.inline and not self._over.is_set():
            raise TimeoutError("the checkpoint waits for work of this inline session")
        if not self._over.wait(timeout):
            raise TimeoutError(f"the checkpoint was not complete within {timeout} s")
        if self._error is not None:
            raise self._error
        return str(self._path)

    def __repr__(self) -> str:
        if not self._over.is_set():
            return "SaveHandle(running)"
        return f"SaveHandle({self._error!r})" if self._error is not None else f"SaveHandle({str(self._path)!r})"


@dataclass
class _Save:
    number: int
    folder: Path
    keep: int | None
    script: bytes = field(repr=False)
    """`script.pt`: what only the script has, as it was at the call."""
    handle: SaveHandle
    units: int
    """How many units will come."""
    step: int = 0
    seed: int = 0
    scaler: dict[str, Any] | None = None
    begun: bool = False
    inbox: deque[StateMsg] = field(default_factory=deque)
    arrived: int = 0
    """Units that have come whole."""
    taken: bool = False
    """Nothing of the session is needed any more."""
    failure: str = ""


class Checkpoints:
    """The saves and loads of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._client = model.client
        self.inline = hasattr(model.client.session, "drive")
        self._registered: list[Any] = []
        self._numbers = itertools.count(1)
        self._running: dict[int, _Save] = {}
        self._queue: deque[_Save] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._frozen: dict[str, tuple[Path, dict[str, Any]]] = {}
        """File of a frozen unit -> where this run has written it last, and its entry."""
        self._restored: set[int] = set()
        self._warned = False

    def register(self, objects: tuple[Any, ...]) -> None:
        """Take these objects along from now on."""
        for thing in objects:
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(f"a {type(thing).__name__} has no state_dict and load_state_dict to be saved with")
            if thing is self._model.module or thing is self._model.optimizer:
                raise ConfigError("the model and the optimizer are in every checkpoint already: register other objects")
            if not any(thing is known for known in self._registered):
                self._registered.append(thing)

    def on_message(self, msg: Any) -> None:
        """What the machine and the optimizer tell (under the client's lock)."""
        if isinstance(msg, RestoredMsg):
            self._restored.add(msg.unit)
            return
        save = self._running.get(msg.request if isinstance(msg, StateMsg) else msg.save)
        if save is None:
            return
        if isinstance(msg, StateMsg):
            save.inbox.append(msg)
            save.arrived += msg.last
        elif isinstance(msg, SnapshotBegunMsg):
            save.begun, save.scaler = True, msg.scaler
        elif isinstance(msg, SnapshotFailedMsg):
            save.failure = f"the optimizer process could not copy the state: {msg.reason}"
        elif isinstance(msg, ev.DropSave):
            save.failure = "a call before it failed, so its step was never done"

    # --- saving: the script's part

    def save(self, folder: str | os.PathLike[str], *, extra: Any, keep: int | None, wait: bool) -> SaveHandle:
        """Queue a save of the state after the newest step."""
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ConfigError(f"keep must be a positive number of checkpoints or None, not {keep!r}")
        model, client = self._model, self._client
        self._warn_scheduler()
        units = sum(unit.trainable for unit in model.layout.units)
        script, handle = self._pickled(extra), SaveHandle(self)
        save = _Save(next(self._numbers), Path(folder).absolute(), keep, script, handle, units)
        room = 1 << 62 if self.inline else max(MIN_ROOM_BYTES, read_host_memory().available()[0] // 2)

        def book() -> ev.SaveEvent:
            save.step = client.machine.step_number(model.number)
            seed = client.machine.seed(model.number)
            save.seed = model.seed if seed is None else seed
            self._running[save.number] = save
            with self._lock:
                self._queue.append(save)
            return ev.SaveEvent(model.number, save.number, room)

        model.act(book)
        self._start_writer()
        self.work_inline()
        if wait:
            handle.result()
        return handle

    def _start_writer(self) -> None:
        with self._lock:
            if self._queue and self._thread is None and not self.inline:
                # no daemon: a script that ends here ends with the checkpoint written
                thread = threading.Thread(target=self._work, name="rpruntime-checkpoint", daemon=False)
                thread.start()
                self._thread = thread

    def _warn_scheduler(self) -> None:
        optimizer = self._model.optimizer
        if optimizer is None or self._warned:
            return
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        if scheduled and not any(getattr(thing, "optimizer", None) is optimizer for thing in self._registered):
            self._warned = True
            warn(
                "a learning-rate scheduler drives the optimizer and is not in the checkpoint: a resumed run would "
                "begin its schedule again; call pipe.register_for_checkpointing(scheduler)",
            )

    def _pickled(self, extra: Any) -> bytes:
        optimizer = self._model.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        values = {
            "extra": extra,
            "registered": [(type(thing).__qualname__, thing.state_dict()) for thing in self._registered],
            "random": _random_state(),
            "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        }
        try:
            return _to_bytes(values)
        except Exception as err:
            name = why_not_picklable(values["extra"], "extra")
            if name == "extra":
                name = why_not_picklable(values["registered"], "registered")
            raise CheckpointError(f"{name}: {err}; it cannot be saved") from err

    def finish(self, *, ending: bool = False) -> None:
        """Wait until every save is over. `ending`: nothing more is computed, so one whose step is not done fails."""
        self._start_writer()
        self.work_inline()
        while True:
            with self._client.lock:
                running = list(self._running.values())
                if ending and (self.inline or self._client.machine.unfinished_steps(self._model.number)):
                    self.fail("the pipe was closed before its step was done")
                elif self._model.books.broken is not None:
                    self.fail(f"the run ended before its step was saved: {self._model.books.broken}")
            self.work_inline()
            if self.inline or not running:
                return
            running[0].handle._over.wait(CHECK_INTERVAL_S)

    def fail(self, reason: str) -> None:
        """Nothing comes any more: end the saves that have not got everything (under the client's lock)."""
        for save in self._running.values():
            if not save.failure and not self._is_whole(save):
                save.failure = reason
        self._client._changed.notify_all()

    def work_inline(self) -> None:
        """Without a thread: write what has come."""
        if not self.inline:
            return
        with contextlib.suppress(Exception):
            self._client._drive()
        while self._queue and self._is_here(self._queue[0]):
            self._write(self._queue.popleft())

    def _is_here(self, save: _Save) -> bool:
        if save.failure or self._client._closed or self._client._broken is not None:
            return True
        return self._is_whole(save)

    def _is_whole(self, save: _Save) -> bool:
        machine, model = self._client.machine, self._model.number
        here = save.begun and save.arrived == save.units
        return save.taken or (here and machine.saved_buffers(model, save.number) is not None)

    # --- saving: the writer's part

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                save = self._queue.popleft()
            try:
                self._write(save)
            except BaseException:  # the handle has it; the saves after this one are written all the same
                log.exception("in the writer of checkpoints")

    def _write(self, save: _Save) -> None:
        """Write a save, whatever happens: its handle has a path or an error after this."""
        handle, what = save.handle, f"checkpoint step-{save.step} in {save.folder}"
        try:
            progress = _SaveNotice(save, quiet=self._model._quiet)
            with writing_in(save.folder):
                writer = CheckpointWriter(save.folder, save.step, progress)
                try:
                    handle._path = self._fill(save, writer, progress)
                except BaseException:
                    writer.abandon()
                    raise
                self._client.checkpoints[self._model.name] = str(handle._path)
                if save.keep is not None:
                    try:
                        prune(save.folder, save.keep, handle._path)
                    except Exception as err:  # this one is complete; the next save tries again
                        log.warning("older checkpoints in %s stay: %s", save.folder, explain(err, save.folder))
        except BaseException as err:
            reason = str(err) if isinstance(err, CheckpointError) else explain(err, save.folder)
            over = self._client._closed or (self._client._broken or self._model.books.broken) is not None
            handle._error = CheckpointError(f"{what} is not written: {reason}{'' if over else '; training goes on'}")
            handle._error.__cause__ = err
            say(f"rpruntime: {handle._error}")
            if not isinstance(err, Exception):
                raise
        finally:
            save.taken = True
            with contextlib.suppress(Exception):
                self._client.do(ev.SaveOverEvent(self._model.number, save.number))
            with self._client.lock:
                self._running.pop(save.number, None)
            handle._over.set()

    def _await(self, save: _Save, ready: Callable[[], bool], what: str) -> None:
        self._client.wait(lambda: bool(save.failure) or ready(), what)
        self._check_failure(save)

    def _check_failure(self, save: _Save) -> None:
        if save.failure:
            raise CheckpointError(save.failure)

    def _fill(self, save: _Save, writer: CheckpointWriter, progress: _SaveNotice) -> Path:
        layout, store, client, model = self._model.layout, self._client.store, self._client, self._model.number
        values: dict[str, dict[str, Any]] = {}
        self._await(save, lambda: save.begun, "the steps before a checkpoint")
        for done in range(save.units):
            parts: list[StateMsg] = []
            while not parts or not parts[-1].last:
                self._await(save, lambda: bool(save.inbox), "a copy of the optimizer's state")
                parts.append(save.inbox.popleft())
            progress.units = done
            self._write_unit(layout.units[parts[0].unit], parts, writer, values)
            client.send("optimizer", SnapshotWrittenMsg(model, save.number, parts[0].unit))
        with client.lock:
            self._check_failure(save)  # else the machine holds what it is to write
            weights, previous = client.machine.saved_weights(model, save.number)
        for unit in layout.units:
            if not unit.trainable:
                self._write_frozen(unit, _params(store, unit, weights[unit.index]), writer)
            elif previous:
                params = _params(store, unit, previous[unit.index])
                tensors = {name: (("previous", name, ""), tensor) for name, tensor in params.items()}
                writer.write_tensors(f"previous-{unit.index:05}.safetensors", tensors)
        self._await(
            save, lambda: client.machine.saved_buffers(model, save.number) is not None, "the buffers of a checkpoint"
        )
        with client.lock:
            self._check_failure(save)
            buffers = client.machine.saved_buffers(model, save.number)
        names = self._write_buffers(buffers or {}, writer)
        save.taken = True
        client.do(ev.SaveOverEvent(model, save.number))  # nothing of the session is read from here on
        writer.write_bytes("optimizer.pt", _to_bytes(values))
        writer.write_bytes("script.pt", save.script)
        path = writer.finish({**self._description(), "buffers": names, "seed": save.seed, "scaler": save.scaler})
        for name, entry in writer.files.items():
            if name.startswith("frozen-"):
                self._frozen[name] = (path / name, entry)
        return path

    def _write_unit(
        self, unit: UnitSpec, parts: list[StateMsg], writer: CheckpointWriter, values: dict[str, dict[str, Any]]
    ) -> None:
        store = self._client.store
        tensors: dict[str, tuple[Place, torch.Tensor]] = {}
        for msg in parts:
            for _, index, name, handle in msg.rows:
                param = unit.params[index].name
                key, place = (
                    (param, ("weight", param, "")) if name == WEIGHT else (f"{param}#{name}", ("state", param, name))
                )
                tensors[key] = (place, store.tensor(handle))
            if msg.payload is not None:
                for (_, index, name), value in pickle.loads(store.skeleton(msg.payload)).items():
                    values.setdefault(unit.params[index].name, {})[name] = value
        writer.write_tensors(f"unit-{unit.index:05}.safetensors", tensors)

    def _write_frozen(self, unit: UnitSpec, params: dict[str, torch.Tensor], writer: CheckpointWriter) -> None:
        """Frozen weights stay the same through a run: one file serves all its checkpoints."""
        name = f"frozen-{unit.index:05}.safetensors"
        if name in self._frozen and writer.link(name, *self._frozen[name]):
            return
        writer.write_tensors(name, {param: (("weight", param, ""), tensor) for param, tensor in params.items()})

    def _write_buffers(self, buffers: dict[int, Payload], writer: CheckpointWriter) -> dict[str, list[str]]:
        tensors: dict[str, tuple[Place, torch.Tensor]] = {}
        names: dict[str, list[str]] = {}
        for position, payload in buffers.items():
            layer = self._model.layout.names[position]
            for local, tensor in self._model.decode(payload).items():
                names.setdefault(layer, []).append(local)
                if tensor is not None:
                    tensors[f"{layer}.{local}"] = (("buffer", layer, local), tensor)
        if tensors:
            writer.write_tensors("buffers.safetensors", tensors)
        return names

    def _description(self) -> dict[str, Any]:
        """What a checkpoint and the model that loads it must agree in."""
        layout, optimizer = self._model.layout, self._model.optimizer
        return {
            "rpruntime": rpruntime.__version__,
            "asynchronous": self._model.asynchronous,
            "optimizer": None if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "parameters": {
                param.name: [list(param.shape), param.dtype, unit.trainable, param.group]
                for unit in layout.units
                for param in unit.params
            },
        }

    # --- loading

    def load(self, folder: str | os.PathLike[str]) -> CheckpointInfo:
        """Check everything, then take it over."""
        path, incomplete = find_checkpoint(folder)
        for entry in [entry for entry in incomplete if not entry.path.name.startswith(".")]:
            warn(f"{entry.path.name} is passed over: {entry.reason}")
        reader = CheckpointReader(path.absolute())
        self._check(reader)
        script, values = reader.objects("script.pt"), reader.objects("optimizer.pt")
        self._check_registered(reader.path, [kind for kind, _ in script["registered"]])
        self._settle()
        meta, model = reader.meta, self._model
        whole = model.optimizer is not None
        previous = bool(meta["asynchronous"] and model.asynchronous) and any(
            place[0] == "previous" for place in reader._places
        )

        def rows_of(unit: UnitSpec) -> tuple[list[tuple[int, str, torch.Tensor]], dict[tuple[int, str], Any]]:
            rows: list[tuple[int, str, torch.Tensor]] = []
            plain: dict[tuple[int, str], Any] = {}
            for index, param in enumerate(unit.params):
                rows.append((index, WEIGHT, reader.tensor(("weight", param.name, ""))))
                if not unit.trainable:
                    continue
                if previous:
                    rows.append((index, PREVIOUS, reader.tensor(("previous", param.name, ""))))
                if whole:
                    for place in reader.places("state", param.name):
                        rows.append((index, place[2], reader.tensor(place)))
                    plain.update({(index, name): value for name, value in values.get(param.name, {}).items()})
            return rows, plain

        buffers = {
            position: {
                local: reader.tensor(("buffer", layer, local)) if reader.has(("buffer", layer, local)) else None
                for local in meta["buffers"][layer]
            }
            for position, layer in enumerate(model.layout.names)
            if layer in meta["buffers"]
        }
        self._install(
            rows_of,
            buffers,
            whole=whole,
            previous=previous,
            step=meta["step"],
            seed=meta["seed"],
            scaler=meta["scaler"],
            before=lambda: self._load_registered(reader.path, [state for _, state in script["registered"]]),
        )
        model.loan.replaced(model.layout.parameters)
        for group, saved in zip(
            model.optimizer.param_groups if model.optimizer else (), script["groups"], strict=False
        ):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        _set_random_state(script["random"])
        self._client.checkpoints[model.name] = str(reader.path)
        model.say(f"step {meta['step']}: goes on from {reader.path}")
        return CheckpointInfo(meta["step"], script["extra"], str(reader.path))

    def _check(self, reader: CheckpointReader) -> None:
        mine, its = self._description(), reader.meta
        differences: list[str] = []
        ours, theirs = mine["parameters"], its["parameters"]
        alone = self._model.optimizer is None
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in theirs:
                differences.append(f"{name} is not in it")
            elif name not in ours:
                differences.append(f"{name} is not in this model")
            else:
                for what, here, there in zip(("shape", "dtype"), ours[name], theirs[name], strict=False):
                    if here != there:
                        differences.append(f"{name} has {what} {there} there and {here} here")
                words = {True: "trained", False: "frozen"}
                if ours[name][2] != theirs[name][2] and not alone:
                    differences.append(f"{name} is {words[theirs[name][2]]} there and {words[ours[name][2]]} here")
                elif ours[name][3] != theirs[name][3] and not alone:
                    differences.append(f"{name} is in group {theirs[name][3]} there and {ours[name][3]} here")
        here_buffers = _buffer_names(self._model)
        for layer in {**here_buffers, **its["buffers"]}:
            there, here = its["buffers"].get(layer, []), here_buffers.get(layer, [])
            if sorted(there) != sorted(here):
                differences.append(f"layer {layer} has buffers {there} there and {here} here")
        if mine["optimizer"] != its["optimizer"] and not alone:
            differences.append(f"the optimizer is {its['optimizer']} there and {mine['optimizer']} here")
        if differences:
            more = f" and {len(differences) - SHOWN_DIFFERENCES} more" if len(differences) > SHOWN_DIFFERENCES else ""
            only_dtypes = all(" has dtype " in each for each in differences)
            what = "a run with another dtype" if only_dtypes else "another model"
            raise CheckpointError(f"{reader.path} is of {what}: {'; '.join(differences[:SHOWN_DIFFERENCES])}{more}")

    def _check_registered(self, path: Path, kinds: list[str]) -> None:
        mine = [type(thing).__qualname__ for thing in self._registered]
        if self._model.optimizer is None and not mine:
            return  # it takes weights and buffers alone
        if mine != kinds:
            raise CheckpointError(
                f"{path} was saved with these registered objects: {', '.join(kinds) or 'none'}; here are "
                f"{', '.join(mine) or 'none'}: call pipe.register_for_checkpointing with the same, in the same order"
            )

    def _load_registered(self, path: Path, states: list[Any]) -> None:
        if not self._registered:
            return
        before = [_from_bytes(_to_bytes(thing.state_dict())) for thing in self._registered]
        try:
            for thing, state in zip(self._registered, states, strict=True):
                thing.load_state_dict(state)
        except BaseException as err:
            for thing, state in zip(self._registered, before, strict=True):
                thing.load_state_dict(state)
            if not isinstance(err, Exception):
                raise
            raise CheckpointError(
                f"a registered {type(thing).__name__} does not take its state from {path}: {type(err).__name__}: {err}"
            ) from err

    def load_weights(self, state: Mapping[str, Any], strict: bool) -> Any:
        """`pipe.load_state_dict`."""
        model, layout = self._model, self._model.layout
        self._settle()
        model.synchronize()
        own = model.module.state_dict(keep_vars=True)
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        problems = [
            f"size mismatch for {name}: {tuple(state[name].shape)} there, {tuple(tensor.shape)} here"
            for name, tensor in own.items()
            if isinstance(tensor, torch.Tensor) and name in state and state[name].shape != tensor.shape
        ]
        if strict:
            problems += [f"missing key {name}" for name in missing] + [f"unexpected key {name}" for name in unexpected]
        if problems:
            raise RuntimeError(f"the state does not fit {type(model.module).__name__}: {'; '.join(problems)}")
        places = layout.place_of()
        given = {places[id(own[name])]: state[name] for name in own if name in state and id(own[name]) in places}

        def rows_of(unit: UnitSpec) -> tuple[list[tuple[int, str, torch.Tensor]], dict[tuple[int, str], Any]]:
            if not any((unit.index, index) in given for index in range(len(unit.params))):
                return [], {}
            rows = []
            for index in range(len(unit.params)):
                if (unit.index, index) in given:
                    rows.append((index, WEIGHT, given[unit.index, index]))
                elif not unit.trainable:  # its slab is written anew
                    rows.append((index, WEIGHT, layout.parameters[unit.index, index].detach()))
            return rows, {}

        with self._client.lock:
            found = self._client.machine.newest_buffers(model.number)
        buffers = {position: model.decode(payload) for position, payload in found.items()}
        names = {id(tensor): name for name, tensor in own.items() if name in state}
        for position, values in buffers.items():
            mine = buffers_of(layout.layers[position])
            for local, old in values.items():
                name = names.get(id(mine.get(local)))  # a layer may be a wrapper: its names are not the model's
                if name is not None and old is not None:
                    values[local] = state[name].detach().to(old.dtype)
        self._install(rows_of, buffers, whole=False, previous=False, step=None, seed=None, scaler=None)
        model.loan.replaced(given)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _settle(self) -> None:
        """Nothing runs and nothing is wanted after this."""
        model = self._model
        self.finish()
        model.finish_open_calls()
        if model.books.open:
            model.say_once("gradients that no step has taken are discarded by loading")
            model.zero_grad()
        model.wait(lambda: not self._client.machine.unfinished_steps(model.number), "the steps issued")
        model.raise_failure()
        self.work_inline()

    def _install(
        self,
        rows_of: Callable[[UnitSpec], tuple[list[tuple[int, str, torch.Tensor]], dict[tuple[int, str], Any]]],
        buffers: dict[int, dict[str, Any]],
        *,
        whole: bool,
        previous: bool,
        step: int | None,
        seed: int | None,
        scaler: dict[str, Any] | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Open an iteration with these weights and buffers; `before` is called once there is room for the buffers."""
        model, client = self._model, self._client
        grad_scaler = model.grad_scaler if model.grad_scaler is not None and model.grad_scaler.is_enabled() else None
        if grad_scaler is not None and scaler is None:
            scaler = grad_scaler.state_dict()
        placed: list[TensorHandle] = []
        payloads = []
        try:
            for position, values in buffers.items():
                skeleton, tensors = take_apart(values)
                first = len(placed)
                for tensor in tensors:
                    placed.append(put_tensor(client, tensor))
                handles = tuple(placed[first:])
                payloads.append((position, Payload(skeleton, handles, (False,) * len(handles))))
            before()
        except BaseException:  # nothing has changed
            for handle in placed:
                client.arena.free(handle.extent)
            raise
        self._frozen.clear()  # their files hold what is replaced now
        call = client.new_call(model.number)
        client.forget_call(call)
        with client.lock:
            current = client.machine.newest_weights(model.number)
        try:
            client.do(ev.RestoreEvent(model.number, call, step, seed, tuple(payloads), previous))
            with client.lock:
                version = client.machine.iteration(model.number)
            sent = scaler if grad_scaler is not None else None
            client.send("optimizer", RestoreMsg(model.number, call, version, previous, sent))
            total, done = sum(unit.nbytes for unit in model.layout.units), 0
            with Bar("restoring weights", quiet=model._quiet) as bar:
                for unit in model.layout.units:
                    rows, plain = rows_of(unit)
                    if not unit.trainable and self._is_as_it_was(unit, rows, current[unit.index]):
                        rows = []
                    self._restore_unit(unit, rows, plain, call, whole=whole)
                    done += unit.nbytes
                    bar.update(done, total)
        except BaseException as err:
            lost = isinstance(err, WorkerDied | SessionLost)
            if model.books.broken is None and lost:
                model.books.broken = err
            elif model.books.broken is None:
                model.books.broken = CheckpointError(
                    f"loading ended half-way ({type(err).__name__}: {err}), the weights are mixed: make a new RoundPipe"
                )
                model.books.broken.__cause__ = err
            if lost or err is model.books.broken or not isinstance(err, Exception):
                raise
            raise model.books.broken from err
        if grad_scaler is not None and scaler is not None:
            grad_scaler._state, grad_scaler._previous_scale = from_dict(scaler)
        model.synchronize()

    def _is_as_it_was(self, unit: UnitSpec, rows: list[tuple[int, str, torch.Tensor]], extent: Extent) -> bool:
        params = list(_params(self._client.store, unit, extent).values())
        return all(_same_bits(params[index], value) for index, _, value in rows)

    def _restore_unit(
        self,
        unit: UnitSpec,
        rows: list[tuple[int, str, torch.Tensor]],
        values: dict[tuple[int, str], Any],
        request: int,
        *,
        whole: bool,
    ) -> None:
        client, model = self._client, self._model.number
        kept: list[TensorHandle] = []

        def put(index: int, name: str, value: torch.Tensor) -> tuple[int, str, TensorHandle]:
            if name == WEIGHT and unit.trainable:
                value = value.to(dtype_of(optimizer_dtype(unit.params[index].dtype)))
            kept.append(put_tensor(client, value))
            return index, name, kept[-1]

        try:
            handles = [put(*row) for row in rows]
            body = cloudpickle.dumps(values) if values else b""
            payload = None
            if len(body) > MAX_INLINE_SKELETON_BYTES:
                kept.append(client.arena.put_bytes(body))
                payload = Payload(kept[-1], (), ())
            elif body:
                payload = Payload(body, (), ())
            with client.lock:
                self._restored.discard(unit.index)
            for start in range(0, max(1, len(handles)), ROWS_A_MESSAGE):
                chunk = tuple(handles[start : start + ROWS_A_MESSAGE])
                last = start + ROWS_A_MESSAGE >= len(handles)
                keeps = whole and unit.trainable
                msg = RestoreUnitMsg(model, request, unit.index, chunk, payload if last else None, keeps, last)
                client.send("optimizer", msg)
            books = self._model.books
            client.wait(lambda: unit.index in self._restored or books.broken is not None, "a unit's new weights")
            if books.broken is not None:
                raise books.broken
        finally:
            for handle in kept:
                client.arena.free(handle.extent)


class _SaveNotice:
    """A line every two seconds of a save that takes long."""

    def __init__(self, save: _Save, *, quiet: bool) -> None:
        self._save, self._quiet = save, quiet
        self._began = self._told = time.monotonic()
        self.units = 0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        if not self._quiet and now - self._told > SAY_INTERVAL_S:
            self._told = now
            part = f"{self.units * 100 // max(1, self._save.units):3}%"
            say(
                f"rpruntime: checkpoint step-{self._save.step} {part}, {nbytes / 2**30:.1f} GiB written, "
                f"{now - self._began:.0f} s"
            )


def read_rows(store: Store, msg: StateMsg) -> tuple[dict[tuple[int, int, str], Any], set[Extent]]:
    """Copies of a part's values, and the extents to be freed after."""
    found: dict[tuple[int, int, str], Any] = {
        (unit, index, name): store.tensor(handle).clone() for unit, index, name, handle in msg.rows
    }
    extents = {handle.extent for *_, handle in msg.rows}
    if msg.payload is not None:
        found.update(pickle.loads(store.skeleton(msg.payload)))
        extents.update(msg.payload.extents())
    return found, extents


def _params(store: Store, unit: UnitSpec, extent: Extent) -> dict[str, torch.Tensor]:
    """Views of a master copy's parameters."""
    memory = store.bytes_of(extent)
    return {param.name: view(memory, param.offset, param.shape, param.dtype) for param in unit.params}


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and (first.numel() == 0 or torch.equal(flat(first), flat(second)))


def _buffer_names(model: Model) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, layer in zip(model.layout.names, model.layout.layers, strict=True):
        if names := list(buffers_of(layer)):
            found.setdefault(name, []).extend(names)
    return found


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
