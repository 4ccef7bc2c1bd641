"""How a save's folder is filled: unit by unit as the optimizer copies them, then what the machine holds."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rpruntime.checkpoints.files import CheckpointWriter, Place
from rpruntime.checkpoints.fit import describe
from rpruntime.checkpoints.handle import Save, SaveNotice
from rpruntime.checkpoints.script import to_bytes
from rpruntime.control import events as ev
from rpruntime.errors import CheckpointError
from rpruntime.loading import views_of
from rpruntime.optimizer.snapshots import WEIGHT
from rpruntime.store.handle import Payload
from rpruntime.wire.messages import SnapshotWrittenMsg, StateMsg, UnitSpec

if TYPE_CHECKING:
    from rpruntime.model import Model


class Filler:
    """Writes the files of a model's saves."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._client = model.client
        self._frozen: dict[str, tuple[Path, dict[str, Any]]] = {}
        """File of a frozen unit -> where this run has written it last, and its entry."""

    def forget_frozen(self) -> None:
        """What lies in files of frozen units is being replaced."""
        self._frozen.clear()

    def fill(self, save: Save, writer: CheckpointWriter, progress: SaveNotice) -> Path:
        """Write everything; the complete checkpoint's folder.

        Raises:
            CheckpointError: something of it will never come.
        """
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
                self._write_frozen(unit, views_of(store, unit, weights[unit.index]), writer)
            elif previous:
                params = views_of(store, unit, previous[unit.index])
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
        writer.write_bytes("optimizer.pt", to_bytes(values))
        writer.write_bytes("script.pt", save.script)
        path = writer.finish({**describe(self._model), "buffers": names, "seed": save.seed, "scaler": save.scaler})
        for name, entry in writer.files.items():
            if name.startswith("frozen-"):
                self._frozen[name] = (path / name, entry)
        return path

    def _await(self, save: Save, ready: Callable[[], bool], what: str) -> None:
        self._client.wait(lambda: bool(save.failure) or ready(), what)
        self._check_failure(save)

    def _check_failure(self, save: Save) -> None:
        if save.failure:
            raise CheckpointError(save.failure)

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
