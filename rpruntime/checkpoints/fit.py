"""What a checkpoint and the model that loads it must agree in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rpruntime
from rpruntime.buffers import buffers_of
from rpruntime.checkpoints.files import CheckpointReader
from rpruntime.errors import CheckpointError

if TYPE_CHECKING:
    from rpruntime.model import Model

SHOWN_DIFFERENCES = 5


def describe(model: Model) -> dict[str, Any]:
    """The model's side, as it is written down."""
    layout, optimizer = model.layout, model.optimizer
    return {
        "rpruntime": rpruntime.__version__,
        "asynchronous": model.asynchronous,
        "optimizer": None if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "parameters": {
            param.name: [list(param.shape), param.dtype, unit.trainable, param.group]
            for unit in layout.units
            for param in unit.params
        },
    }


def check_fits(model: Model, reader: CheckpointReader) -> None:
    """Raises CheckpointError if a checkpoint is of another model; with the first differences."""
    mine, its = describe(model), reader.meta
    differences: list[str] = []
    ours, theirs = mine["parameters"], its["parameters"]
    alone = model.optimizer is None
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
    here_buffers = _buffer_names(model)
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


def _buffer_names(model: Model) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, layer in zip(model.layout.names, model.layout.layers, strict=True):
        if names := list(buffers_of(layer)):
            found.setdefault(name, []).extend(names)
    return found
