"""The start of a model on a session: an older one of its name goes, the processes load it, its parts are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rpruntime import records
from rpruntime.calls import Calls
from rpruntime.checkpoints.checkpoints import Checkpoints
from rpruntime.control import events as ev
from rpruntime.errors import ConfigError
from rpruntime.loading import Loader, Loan, ModelPackage, initial_buffers
from rpruntime.metrics import Figures
from rpruntime.preparing import Prepared
from rpruntime.script_model import ScriptModel
from rpruntime.script_weights import ScriptWeights
from rpruntime.wire.succession import ModelState

if TYPE_CHECKING:
    from rpruntime.model import Model


def replace_older(model: Model, found: ModelState | None) -> None:
    """Close a model of the same name. Raises ConfigError: an open one has parameters of this model."""
    models = model.client.models.loaded
    if found is None and model.client.models.drop_left(model.name):
        model.say(f"model {model.name!r}, left by another program, is made anew; RoundPipe.attach would go on with it")
    older = models.get(model.name)
    if older is not None and not older.closed:
        model.say(f"pipe {model.name!r} is made again: the older one is closed (pass name= to have two)")
        try:
            older.close()
        except Exception:
            if older.books.broken is None:  # else it has been raised before
                raise
    ids = set(map(id, model.layout.parameters.values()))
    for other in list(models.values()):
        if not other.closed and not ids.isdisjoint(map(id, other.layout.parameters.values())):
            raise ConfigError(
                f"pipe {other.name!r} has parameters of this model already, and both would write them back at "
                "their end: close it first, or use it for both"
            )
    models[model.name] = model


def load(model: Model, prepared: Prepared) -> None:
    """Have all processes load a model; returns when they have, or raises what stopped one, and nothing is left."""
    client = model.client
    loader = Loader(client, model.layout, model._quiet)
    model.loan = Loan(client, model.layout, keep=model.optimizer is None)
    try:
        loader.check_memory(model.optimizer, model.asynchronous, model.loan.nbytes)
    except BaseException:
        model.loan.cancel()
        raise
    model._listener = loader.on_message
    model.number = client.add_listener(lambda msg: model._listener(msg))
    package: ModelPackage | None = None
    grad_scaler = model.grad_scaler
    scaler = grad_scaler._state if grad_scaler is not None and grad_scaler.is_enabled() else None
    model.seed = torch.initial_seed() if prepared.seed is None else prepared.seed
    try:
        if client.session.served:
            records.save_model(client.session.folder, model.number, prepared)
        package = ModelPackage(
            client,
            model.layout,
            model.optimizer,
            prepared.loss_fn,
            model=model.number,
            name=model.name,
            seed=model.seed,
            recompute=prepared.recompute,
            asynchronous=model.asynchronous,
            cast=prepared.cast,
            scaler=scaler,
            lent=model.loan.extents,
        )
        client.wait_roles()
        allocated = loader.run(package)
    except BaseException:
        if package is not None:
            loader.undo(package)
        client.remove_listener(model.number)
        model.loan.cancel()
        raise
    model.package = package  # replacements of workers read it
    model.checkpoints = Checkpoints(model)
    model._listener = model.books.on_message
    model.calls = Calls(model)
    client.do(
        ev.ModelAddedEvent(
            model=model.number,
            units=tuple(model.layout.units),
            layer_units=tuple(tuple(units) for units in model.layout.layer_units),
            buffers=initial_buffers(client, model.layout),
            grain=prepared.recompute,
            asynchronous=model.asynchronous,
            master=allocated.master,
            loss_scale=1.0 if scaler is None else scaler.scale,
        )
    )
    model.weights = ScriptWeights(model, dict(enumerate(allocated.master)))
    model.script = ScriptModel(model)
    model.figures = Figures(model)
    model.loan.begin()
