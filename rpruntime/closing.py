"""The end of a model: what was issued is finished or given up, and everything it holds is let go."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from rpruntime import records
from rpruntime.control import events as ev
from rpruntime.errors import RoundPipeError, SessionLost, WorkerDied
from rpruntime.script_optimizer import fill_state, unpatch_optimizer
from rpruntime.store.layout import optimizer_layout
from rpruntime.store.limits import read_host_memory
from rpruntime.terminal import saying

if TYPE_CHECKING:
    from rpruntime.model import Model

log = logging.getLogger(__name__)

ABANDON_TIMEOUT_S = 10.0
"""How long a model that is being closed waits for work that it has cancelled."""
KEPT_STATE_FACTOR = 4
"""`close` takes the optimizer's state over where the host has room for so many fp32 copies of the parameters."""


def close(model: Model) -> None:
    """End the model, not the session; the newest weights stay in the script's private memory.

    Whatever it raises, the model is closed and the session has forgotten it.
    """
    with saying("the pipe is closing: last steps, then the weights", quiet=model._quiet):
        try:
            _come_to_rest(model)
        finally:
            end(model)


def close_after_error(model: Model) -> None:
    """Do the steps that were asked for, cancel the rest; without another exception: the script has one already."""
    try:
        model.books.failure = None
        _abandon(model, sealed=False)
        model.synchronize()
        _keep_optimizer_state(model)
    except Exception as err:
        known = isinstance(err, SessionLost | WorkerDied)  # the script's error says it
        level = logging.DEBUG if known else logging.WARNING
        log.log(level, "closing pipe %s after an error: %s: %s", model.name, type(err).__name__, err)
    finally:
        with contextlib.suppress(Exception):
            end(model)


def _come_to_rest(model: Model) -> None:
    """Wait for everything issued, and take what stays over."""
    failure = None
    try:
        model.drop_incomplete()
        model.synchronize()
        model.finish_open_calls()
    except Exception as err:
        if model.books.broken is not None or not hasattr(err, "rp_context"):
            raise
        failure = err
        model.synchronize()  # the weights are those before the iteration that failed
    _keep_optimizer_state(model)
    if failure is not None:
        raise failure
    with model.client.lock:
        forgotten = len(model.client.machine.wanted_calls(model.number)) if model.optimizer is not None else 0
    if forgotten and _iteration(model) == 0:
        model.say(f"pipe {model.name!r} made {forgotten} calls of forward_backward and no step(): nothing was trained")


def _keep_optimizer_state(model: Model) -> None:
    """Into the script's optimizer, where its memory is no burden; else asking for it later is an error."""
    if model.optimizer is None or _iteration(model) == 0:
        return
    wide = sum(optimizer_layout(unit)[1] for unit in model.layout.units if unit.trainable)
    room = read_host_memory().available(model.client.session.config.get("host_memory"))[0]
    if KEPT_STATE_FACTOR * wide < room:
        fill_state(model.optimizer, model)
        model.state_is_kept = True


def _iteration(model: Model) -> int:
    with model.client.lock:
        return model.client.machine.iteration(model.number)


def _abandon(model: Model, *, sealed: bool) -> None:
    """Cancel what still runs (`sealed`: also what steps wait for); waits a while for who does not answer."""
    machine = model.client.machine
    while True:  # of evaluations, one goes at a time
        model.client.do(ev.AbandonEvent(model.number, sealed))
        if not machine.is_cancelling(model.number):
            return
        model.client.wait(lambda: not machine.is_cancelling(model.number), "the end of what ran", ABANDON_TIMEOUT_S)


def end(model: Model) -> None:
    """Let go of everything, also where the session is gone."""
    with contextlib.suppress(RoundPipeError):
        _abandon(model, sealed=True)
    try:
        model.loan.end(model.weights.shown(everything=model.synchronized))
    finally:
        model.closed = True
        model.script.release()
        if model.optimizer is not None:
            unpatch_optimizer(model.optimizer, lost=_iteration(model) > 0 and not model.state_is_kept)
        model.books.cancel_all(lambda: RoundPipeError("cancelled: the pipe was closed while this was running"))
        model.figures.close()
        try:
            model.checkpoints.saves.finish(ending=True)
        finally:
            with contextlib.suppress(RoundPipeError):  # the session is gone, and the model with it
                model.client.do(ev.ModelRemovedEvent(model.number))
            model.client.remove_listener(model.number)
            if model.client.session.served:
                records.remove(model.client.session.folder, model.number)
                model.say(
                    f"pipe {model.name!r} is closed, and gone from the session: without `with` and close() it stays"
                )
            # one that starts right now may be reading it
            if model.package is not None and not model.client.machine.replaced_workers:
                model.package.free()
