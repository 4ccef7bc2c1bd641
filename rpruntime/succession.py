"""A model passes from one program to the next: left by a detachment or a death, taken over after an attachment.

See docs/client.md; what the processes keep is in `rpruntime/optimizer/kept.py`, what only scripts know in `records.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpruntime import records
from rpruntime.calls import Calls
from rpruntime.checkpoints.checkpoints import Checkpoints
from rpruntime.control import events as ev
from rpruntime.errors import RoundPipeError
from rpruntime.failures import raise_role_failure
from rpruntime.loading import Loan
from rpruntime.metrics import Figures
from rpruntime.script_model import ScriptModel
from rpruntime.script_optimizer import hyper_parameters, unpatch_optimizer
from rpruntime.script_weights import ScriptWeights
from rpruntime.wire.codec import unpack_struct
from rpruntime.wire.messages import LoadModelMsg, ModelReadyMsg, RoleFailedMsg
from rpruntime.wire.succession import ModelState

if TYPE_CHECKING:
    from rpruntime.model import Model


def take_over(model: Model, recompute: str, found: ModelState) -> None:
    """Go on with what another controller has left: the workers load it, the optimizer has it."""
    client = model.client
    ready: set[str] = set()
    failures: list[RoleFailedMsg] = []

    def on_loading(msg: Any) -> None:
        if isinstance(msg, ModelReadyMsg):
            ready.add(msg.role)
        elif isinstance(msg, RoleFailedMsg):
            failures.append(msg)

    model.loan = Loan(client, model.layout)  # of nothing: the weights are in the session
    model._listener = on_loading
    model.number = client.add_listener(lambda msg: model._listener(msg), found.model)
    client.do(ev.ModelFoundEvent(LoadModelMsg(found.model, found.spec)))
    client.wait(lambda: bool(failures) or ready >= set(client.machine.living_workers), "the model in every worker")
    if failures:
        client.remove_listener(model.number)
        raise_role_failure(failures[0])
    model.package = None
    model.checkpoints = Checkpoints(model)
    model._listener = model.books.on_message
    model.calls = Calls(model)
    spec = unpack_struct(bytes(client.store.tensor(found.spec).numpy()))
    model.seed = spec.seed
    client.do(
        ev.ModelAddedEvent(
            model=model.number,
            units=tuple(model.layout.units),
            layer_units=tuple(tuple(units) for units in model.layout.layer_units),
            buffers=found.buffers,
            grain=recompute,
            asynchronous=model.asynchronous,
            master=found.master,
            loss_scale=dict(found.scales).get(found.version, 1.0),
            found=found,
        )
    )
    if model.grad_scaler is not None and found.scaler is not None:
        model.grad_scaler._state = found.scaler
    model.weights = ScriptWeights(model, dict(enumerate(found.master)))
    model.weights.fetch()  # the buffers too
    model.script = ScriptModel(model)
    model.figures = Figures(model)
    left = records.load_part(client.session.folder, model.number, "left", records.Left(0, [], []))
    if left.version == found.version:
        if model.optimizer is not None:
            for group, values in zip(model.optimizer.param_groups, left.groups, strict=False):
                group.update(values)
        model.books.reopen(left.calls if found.calls else [])


def detach(model: Model, *, wait: bool) -> None:
    """Leave a model to the next program that attaches to the session."""
    try:
        if wait:
            _leave_open(model)
    finally:
        model.closed = True
        model.script.release()
        if model.optimizer is not None:
            unpatch_optimizer(model.optimizer, lost=True)
        model.books.cancel_all(lambda: RoundPipeError("cancelled: this program has detached from the session"))
        model.figures.close()
        model.checkpoints.saves.finish(ending=True)


def _leave_open(model: Model) -> None:
    """Wait for everything issued; what no step has taken is kept for the next program."""
    model.drop_incomplete()
    model.wait_for_steps()
    model.raise_failure()
    model.finish_open_calls()
    calls = [(model.books.finished[call], scale) for call, _, scale in model.books.open]
    groups = [] if model.optimizer is None else list(hyper_parameters(model.optimizer, model.weights.trained))
    with model.client.lock:
        version = model.client.machine.iteration(model.number)
    model.remember("left", records.Left(version, calls, groups))
    model.remember("user_state", model.user_state)
    model.books.kept = False
    model.client.do(ev.KeepOpenEvent(model.number))
    model.wait(lambda: model.books.kept, "the gradients in the optimizer's memory")
