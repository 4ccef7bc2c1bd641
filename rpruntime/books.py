"""The books of one model: calls and steps whose results the script waits for, and what failed.

Everything here happens under the client's lock, most of it in the client's receiver thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rpruntime.control import events as ev
from rpruntime.errors import RoundPipeError
from rpruntime.failures import rebuild
from rpruntime.layout import shown_class
from rpruntime.microbatch import merge_metrics
from rpruntime.results import Loss, StepInfo
from rpruntime.wire.messages import (
    ErrorInfo,
    RestoredMsg,
    RoleFailedMsg,
    SnapshotBegunMsg,
    SnapshotFailedMsg,
    StateMsg,
)

if TYPE_CHECKING:
    from rpruntime.model import Model

_OF_SAVES = (ev.DropSave, SnapshotBegunMsg, SnapshotFailedMsg, RestoredMsg)


class Books:
    """Results that are not here yet, by number.

    Attributes:
        losses: of calls that run.
        finished: calls whose step is not done.
        steps: steps issued and not done: the future, the calls, the learning rates.
        open: calls of the open iteration, with their loss and scale.
        failure: the user's exception that the next wait or call is to raise.
        broken: why nothing works any more.
        last_step: the newest step that is done.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.losses: dict[int, Loss] = {}
        self.finished: dict[int, ev.FinishCall] = {}
        self.steps: dict[int, tuple[StepInfo, tuple[int, ...], tuple[float, ...]]] = {}
        self.open: list[tuple[int, Loss, float]] = []
        self.failure: BaseException | None = None
        self.broken: BaseException | None = None
        self.last_step: StepInfo | None = None
        self.asked: tuple[int, list[StateMsg]] = (0, [])
        """A request to the optimizer and the parts of its answer."""

    def on_message(self, msg: Any) -> None:
        """Take in an instruction of the machine or a message about the model."""
        if isinstance(msg, ev.FinishCall):
            self._on_call_finished(msg)
        elif isinstance(msg, ev.FinishStep):
            self._on_step_finished(msg)
        elif isinstance(msg, ev.NoteTimes | ev.NoteShortage):
            if self._model.on_note is not None:
                self._model.on_note(msg)
        elif isinstance(msg, ev.ReportFailure):
            self._on_failure(msg)
        elif isinstance(msg, StateMsg):
            if msg.what == "snapshot":
                self._model.checkpoints.on_message(msg)
            elif msg.request == self.asked[0]:
                self.asked[1].append(msg)
            else:  # nobody waits for it any more
                self._model.client.free({handle.extent for *_, handle in msg.rows})
        elif isinstance(msg, _OF_SAVES):
            self._model.checkpoints.on_message(msg)
        elif isinstance(msg, RoleFailedMsg):
            self._on_broken(rebuild(msg.error, 0, self._model.step_count))

    def _on_broken(self, error: BaseException) -> None:
        self.broken = broken = self.broken or error
        self.cancel_all(lambda: broken)
        self._model.checkpoints.fail(f"the run ended before its step was saved: {broken}")

    def cancel_all(self, error: Callable[[], BaseException]) -> None:
        """Nothing that is pending will finish."""
        for pending in [*self.losses.values(), *(info for info, _, _ in self.steps.values())]:
            pending._cancel(error)

    def _on_call_finished(self, msg: ev.FinishCall) -> None:
        loss = self.losses.pop(msg.call)
        self.finished[msg.call] = msg
        for microbatch, value in enumerate(msg.losses):
            if value != value:
                self._model.say(
                    f"the loss of micro-batch {microbatch + 1} is nan (call {msg.call}, about step "
                    f"{self._model.step_count}); the run goes on"
                )
                break
        loss._finish(msg.loss)

    def _on_step_finished(self, msg: ev.FinishStep) -> None:
        done, model = msg.msg, self._model
        if model.grad_scaler is not None and done.scaler is not None:
            model.grad_scaler._follow(done.scaler, asynchronous=model.asynchronous)
        info, calls, lr = self.steps.pop(done.step)
        finished = [self.finished.pop(call) for call in calls]
        metrics = [(m, w) for f in finished for m, w in zip(f.metrics, f.weights, strict=True) if w]
        fields = {
            "step": model.client.machine.step_number(model.number, done.step),
            "loss": sum(f.loss * f.scale for f in finished),
            "grad_norm": done.grad_norm,
            "skipped": done.skipped,
            "lr": lr,
            "loss_scale": done.loss_scale,
            "seconds": done.seconds,
            "metrics": merge_metrics([m for m, _ in metrics], [w for _, w in metrics]) if metrics else {},
        }
        info._finish(fields)
        self.last_step = info
        model.figures.step_finished(fields, calls)

    def _on_failure(self, msg: ev.ReportFailure) -> None:
        model, where = self._model, f"call {msg.call}"
        step = model.client.machine.step_number(model.number, msg.steps[0] if msg.steps else None)
        cause = rebuild(self._named(msg.error), msg.num_microbatches, step)
        self.failure = self.failure or cause
        for number in msg.calls:
            if number in self.losses:
                self.losses.pop(number)._cancel(self._cancelled(cause, where))
            self.finished.pop(number, None)
        model.figures.forget_calls(msg.calls)
        for number in msg.steps:
            self.steps.pop(number)[0]._cancel(self._cancelled(cause, where))
        self.open = [entry for entry in self.open if entry[0] not in msg.calls]
        if msg.steps and hasattr(cause, "add_note"):
            cause.add_note(
                f"{len(msg.steps)} step(s) issued after it were cancelled; scheduler steps taken meanwhile are not "
                "undone"
            )

    def _named(self, error: ErrorInfo) -> ErrorInfo:
        """With the names that who reported it does not know: the controller's machine knows numbers and roles."""
        session, layout = self._model.client.session, self._model.layout
        roles = dict(zip(session.worker_roles, session.devices, strict=False))
        error = dataclasses.replace(error, device=roles.get(error.device, error.device))
        if error.layer < 0 or error.layer_name:
            return error
        name = f"{layout.names[error.layer]} ({shown_class(layout.layers[error.layer])})"
        return dataclasses.replace(error, layer_name=name)

    def _cancelled(self, cause: BaseException, where: str) -> Callable[[], BaseException]:
        def error() -> BaseException:
            if self.failure is cause:
                self._model.await_cancelled()
                self.failure = None
                return cause
            return RoundPipeError(f"cancelled: {type(cause).__name__} in {where}: {cause}")

        return error
