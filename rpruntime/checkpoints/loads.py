"""`load_checkpoint` and `load_state_dict`: what is read, checked whole before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rpruntime.buffers import buffers_of
from rpruntime.checkpoints.files import CheckpointReader
from rpruntime.checkpoints.restoring import Replacement, Row
from rpruntime.optimizer.snapshots import PREVIOUS, WEIGHT
from rpruntime.wire.messages import UnitSpec

if TYPE_CHECKING:
    from rpruntime.model import Model


def of_checkpoint(model: Model, reader: CheckpointReader, values: dict[str, dict[str, Any]]) -> Replacement:
    """A checkpoint that fits the model; without an optimizer, weights and buffers alone.

    Args:
        values: the optimizer's state that is no tensor, by parameter and name.
    """
    meta = reader.meta
    whole = model.optimizer is not None
    previous = bool(meta["asynchronous"] and model.asynchronous) and any(
        place[0] == "previous" for place in reader._places
    )

    def rows_of(unit: UnitSpec) -> tuple[list[Row], dict[tuple[int, str], Any]]:
        rows: list[Row] = []
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
    return Replacement(
        rows_of,
        buffers,
        model.layout.parameters,
        whole=whole,
        previous=previous,
        step=meta["step"],
        seed=meta["seed"],
        scaler=meta["scaler"],
    )


def of_state(model: Model, state: Mapping[str, Any], strict: bool) -> tuple[Replacement, Any]:
    """A state dict, and what torch's `load_state_dict` returns of it; the model is synchronized.

    Raises:
        RuntimeError: as torch's, for a name or shape that does not fit.
    """
    layout = model.layout
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

    def rows_of(unit: UnitSpec) -> tuple[list[Row], dict[tuple[int, str], Any]]:
        if not any((unit.index, index) in given for index in range(len(unit.params))):
            return [], {}
        rows = []
        for index in range(len(unit.params)):
            if (unit.index, index) in given:
                rows.append((index, WEIGHT, given[unit.index, index]))
            elif not unit.trainable:  # its slab is written anew
                rows.append((index, WEIGHT, layout.parameters[unit.index, index].detach()))
        return rows, {}

    with model.client.lock:
        found = model.client.machine.newest_buffers(model.number)
    buffers = {position: model.decode(payload) for position, payload in found.items()}
    names = {id(tensor): name for name, tensor in own.items() if name in state}
    for position, values in buffers.items():
        mine = buffers_of(layout.layers[position])
        for local, old in values.items():
            name = names.get(id(mine.get(local)))  # a layer may be a wrapper: its names are not the model's
            if name is not None and old is not None:
                values[local] = state[name].detach().to(old.dtype)
    return Replacement(rows_of, buffers, given), torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
