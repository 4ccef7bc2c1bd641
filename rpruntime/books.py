"""The books of one model: calls and steps whose results the script waits for, and what failed.

Everything here happens under the client's lock, most of it in the client's receiver thread.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rpruntime.control import events as ev
from rpruntime.errors import RoundPipeError
from rpruntime.failures import rebuild
from rpruntime.iteration import (
    Events,
    FailureEvent,
    LossEvent,
    StepEvent,
    TaskEvent,
    TaskFuture,
    TaskResult,
    TaskSpan,
)
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
from rpruntime.wire.succession import KeptMsg

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
        tasks: submitted tasks that are not done, by slot, with their call.
        listeners: who wants to hear what happens.
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
        self.tasks: dict[int, tuple[TaskFuture, int]] = {}
        self.listeners: weakref.WeakSet[Events] = weakref.WeakSet()
        self.asked: tuple[int, list[StateMsg]] = (0, [])
        """A request to the optimizer and the parts of its answer."""
        self.kept = False
        """Whether the optimizer has all of the open iteration, for the program after this one."""

    def reopen(self, calls: Iterable[tuple[ev.FinishCall, float]]) -> None:
        """Calls that another program has made belong to the open iteration."""
        for done, scale in calls:
            loss = Loss(self._model.client, "the loss of a call")
            loss._finish(done.loss)
            self.finished[done.call] = done
            self.open.append((done.call, loss, scale))

    def on_message(self, msg: Any) -> None:
        """Take in an instruction of the machine or a message about the model."""
        if isinstance(msg, ev.FinishCall):
            self._on_call_finished(msg)
        elif isinstance(msg, ev.FinishTask):
            self._on_task_finished(msg)
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
        elif isinstance(msg, KeptMsg):
            self.kept = True
        elif isinstance(msg, _OF_SAVES):
            self._model.checkpoints.on_message(msg)
        elif isinstance(msg, RoleFailedMsg):
            self._on_broken(rebuild(msg.error, 0, self._model.step_count))

    def _on_broken(self, error: BaseException) -> None:
        self.broken = broken = self.broken or error
        self.cancel_all(lambda: broken)
        self._model.checkpoints.saves.fail(f"the run ended before its step was saved: {broken}")

    def cancel_all(self, error: Callable[[], BaseException]) -> None:
        """Nothing that is pending will finish."""
        for pending in [*self.losses.values(), *(info for info, _, _ in self.steps.values())]:
            pending._cancel(error)
        for slot in list(self.tasks):
            self._cancel_task(slot, error)

    def tell(self, event: TaskEvent | LossEvent | StepEvent | FailureEvent) -> None:
        """Something has happened."""
        for listener in self.listeners:
            listener._put(event)

    def drop_calls(self, calls: Iterable[int], error: Callable[[], BaseException]) -> None:
        """These calls of the open iteration will not finish, or nobody wants their gradients."""
        gone = set(calls)
        for number in gone & self.losses.keys():
            self.losses.pop(number)._cancel(error)
        for number in gone:
            self.finished.pop(number, None)
        for slot in [slot for slot, (_, call) in self.tasks.items() if call in gone]:
            self._cancel_task(slot, error)
        self.open = [entry for entry in self.open if entry[0] not in gone]

    def _cancel_task(self, slot: int, error: Callable[[], BaseException]) -> None:
        future, _ = self.tasks.pop(slot)
        future._cancel(error)
        if self.listeners:
            why = RoundPipeError(f"cancelled: task {future.task}")
            self.tell(TaskEvent(TaskResult(future.task, slot, "", error=why)))

    def _fail_task(self, slot: int, cause: BaseException) -> None:
        """The user's code raised in this one: waiting for it raises that, each time."""
        if slot not in self.tasks:
            return
        future, _ = self.tasks.pop(slot)

        def error() -> BaseException:
            if self.failure is cause:
                self._model.await_cancelled()
                self.failure = None
            return cause

        future._cancel(error)
        self.tell(TaskEvent(TaskResult(future.task, slot, "", error=cause)))

    def _on_task_finished(self, msg: ev.FinishTask) -> None:
        future, _ = self.tasks.pop(msg.slot)
        spans = tuple(
            TaskSpan(phase, range(start, stop), microbatch, began, ended)
            for phase, start, stop, microbatch, began, ended in msg.spans
        )
        result = TaskResult(future.task, msg.slot, self._device_of(msg.role), spans, msg.tries)
        future._finish(result)
        self.tell(TaskEvent(result))

    def _device_of(self, role: str) -> str:
        session = self._model.client.session
        return dict(zip(session.worker_roles, session.devices, strict=False)).get(role, role)

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
        stepped = [call for _, calls, _ in self.steps.values() for call in calls]
        if msg.call in stepped or any(msg.call == call for call, _, _ in self.open):  # no evaluation
            self.tell(LossEvent(msg.call, msg.loss))

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
        self.tell(StepEvent(info))
        model.figures.step_finished(fields, calls)

    def _on_failure(self, msg: ev.ReportFailure) -> None:
        model, where = self._model, f"call {msg.call}"
        step = model.client.machine.step_number(model.number, msg.steps[0] if msg.steps else None)
        cause = rebuild(self._named(msg.error), msg.num_microbatches, step)
        self.failure = self.failure or cause
        if msg.slot in self.tasks:
            where = f"task {self.tasks[msg.slot][0].task} of {where}"
            cause.add_note(f"in {where}")  # type: ignore[attr-defined, unused-ignore]  # `rebuild` sees to it
        self._fail_task(msg.slot, cause)
        self.drop_calls(msg.calls, self._cancelled(cause, where))
        model.figures.forget_calls(msg.calls)
        for number in msg.steps:
            self.steps.pop(number)[0]._cancel(self._cancelled(cause, where))
        self.tell(FailureEvent(cause, msg.calls, msg.steps))
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
