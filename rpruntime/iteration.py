"""`Iteration`: a training call whose tasks the program submits itself, and what it hears of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rpruntime.control import events as ev
from rpruntime.control.coverage import TaskOrder, spelled
from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.results import Loss, StepInfo, _Pending

if TYPE_CHECKING:
    from rpruntime.client import Client
    from rpruntime.model import Model


@dataclass(frozen=True)
class StageTask:
    """Consecutive layers over some micro-batches on one device; prints as `fused 4-5 mb 0-7`.

    Attributes:
        kind: "forward" (layers before the last), "fused" (the last layers: forward, loss, backward) or "backward".
        layers: a range, such as range(0, 3).
        microbatches: their numbers, ascending; None: all of the iteration.
        device: a device's name ("cuda:1"), its index in the session, or a worker's role ("worker-1"); None: the
            session's devices in turn. Where that worker has died and nobody replaces it, another takes the task.
        after: futures of tasks that must be done before, besides those whose results it reads.
    """

    kind: str
    layers: range
    microbatches: Sequence[int] | None = None
    device: str | int | None = None
    after: Sequence[TaskFuture] = ()

    def __str__(self) -> str:
        is_range = isinstance(self.layers, range) and len(self.layers) > 0
        layers = f"{self.layers.start}-{self.layers.stop - 1}" if is_range else repr(self.layers)
        which = "" if self.microbatches is None else f" mb {spelled(tuple(self.microbatches))}"
        where = "" if self.device is None else f" on {self.device}"
        return f"{self.kind} {layers}{which}{where}"


class TaskSpan(NamedTuple):
    """What the device computed from `start_ms` to `end_ms`, on the machine's monotonic clock.

    `phase`: "forward", "loss", "recompute" or "backward".
    """

    phase: str
    layers: range
    microbatch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class TaskResult:
    """A task that is done, or will never be.

    Attributes:
        task: as it was submitted.
        slot: its number.
        device: where it ran.
        spans: what the device computed; empty where there was nothing to compute, or for a task that was cancelled.
        tries: more than 1 where the device's memory was too small at first.
        error: why it failed or was cancelled; None: it is done.
    """

    task: StageTask
    slot: int
    device: str
    spans: tuple[TaskSpan, ...] = ()
    tries: int = 0
    error: BaseException | None = None

    def __repr__(self) -> str:
        state = f"{self.busy_ms:.1f} ms" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return f"<TaskResult {self.task}, slot {self.slot}{f', ran on {self.device}' * bool(self.device)}: {state}>"

    @property
    def start_ms(self) -> float | None:
        """When its first computation began; None: there was none."""
        return min((span.start_ms for span in self.spans), default=None)

    @property
    def end_ms(self) -> float | None:
        """When its last computation ended."""
        return max((span.end_ms for span in self.spans), default=None)

    @property
    def busy_ms(self) -> float:
        """The device's time."""
        return sum(span.end_ms - span.start_ms for span in self.spans)


class TaskFuture(_Pending):
    """The result of a submitted task, which may not be here yet.

    Attributes:
        task: as it was submitted.
        slot: its number: a device takes its tasks in this order.
    """

    def __init__(self, client: Client, task: StageTask, slot: int, model: int) -> None:
        super().__init__(client, f"task {task}")
        self.task, self.slot, self.model = task, slot, model

    def result(self, timeout: float | None = None) -> TaskResult:
        """Wait for the task.

        Raises:
            The exception of the user's code in it; RoundPipeError: it was cancelled; TimeoutError after `timeout`
            seconds.
        """
        found: TaskResult = self._wait(timeout)
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the task; what `result` would raise, None where it is done."""
        try:
            self._wait(timeout)
        except TimeoutError as err:
            if not self._finished:
                raise
            return err
        except Exception as err:
            return err
        return None

    def __repr__(self) -> str:
        state = "running" if not self._finished else "done" if self._error is None else "cancelled"
        return f"<TaskFuture {self.slot} {self.task}: {state}>"


class Iteration:
    """One batch, from `Model.iteration`. Submit tasks until every micro-batch has passed every layer up and down.

    Attributes:
        number: of the call, in the session.
        num_microbatches: micro-batches that the batch was cut into.
    """

    def __init__(self, model: Model, number: int, loss: Loss, num_microbatches: int) -> None:
        self._model = model
        self._loss = loss
        self.number = number
        self.num_microbatches = num_microbatches

    def __repr__(self) -> str:
        return f"<Iteration {self.number} of {self._model.name}, {self.num_microbatches} micro-batches>"

    def submit(self, task: StageTask) -> TaskFuture:
        """Hand a task out; returns at once. See `submit_all`."""
        return self.submit_all([task])[0]

    def submit_all(self, tasks: Iterable[StageTask]) -> list[TaskFuture]:
        """Hand tasks out together; returns at once.

        What a task reads has been submitted before it. Of tasks that are submitted together it is known who reads
        what, so less is copied to host memory, and workers tell each other.

        Raises:
            ConfigError: one of them may not come next; names it. None of them is submitted.
            RoundPipeError: the iteration has failed or was given up.
        """
        model, listed = self._model, [tasks] if isinstance(tasks, StageTask) else list(tasks)
        model.start_of_call()
        event = ev.TasksEvent(model.number, self.number, tuple(map(self._order, listed)))
        futures: list[TaskFuture] = []

        def book() -> ev.TasksEvent:
            machine = model.client.machine
            if not machine.is_known(self.number):
                raise RoundPipeError(f"{self!r} is over: it was stepped, given up, or cancelled with one that failed")
            machine.check_tasks(event)
            for slot, task in enumerate(listed, machine.next_slot):
                futures.append(TaskFuture(model.client, task, slot, model.number))
                model.books.tasks[slot] = (futures[-1], self.number)
            return event

        model.act(book)
        return futures

    def _order(self, task: StageTask) -> TaskOrder:
        if not isinstance(task, StageTask):
            raise ConfigError(f"submit takes an rp.StageTask, not a {type(task).__name__}")
        if not isinstance(task.layers, range):
            raise ConfigError(f"task {task}: layers must be a range of consecutive layers, such as range(0, 3)")
        earlier = (task.after,) if isinstance(task.after, TaskFuture) else task.after
        for other in earlier:
            if not isinstance(other, TaskFuture) or other.model != self._model.number:
                raise ConfigError(f"task {task}: after takes futures of tasks of the same model, not {other!r}")
        microbatches = range(self.num_microbatches) if task.microbatches is None else task.microbatches
        after = tuple(other.slot for other in earlier)
        return TaskOrder(task.kind, task.layers, tuple(microbatches), self._role(task), after)

    def _role(self, task: StageTask) -> str:
        session, device = self._model.client.session, task.device
        roles: tuple[str, ...] = session.worker_roles
        if device is None:
            return ""
        if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < len(roles):
            return roles[device]
        if device in roles:
            return str(device)
        named = [role for role, name in zip(roles, session.devices, strict=False) if name == device]
        if len(named) != 1:
            raise ConfigError(
                f"task {task}: the session has no device {device!r}; it has {', '.join(session.devices)}, or 0 to "
                f"{len(roles) - 1}, or {', '.join(roles)}"
            )
        return named[0]

    def missing(self) -> str:
        """What is still to be submitted, in words; empty: nothing."""
        with self._model.client.lock:
            machine = self._model.client.machine
            return machine.missing_tasks(self._model.number) if machine.is_known(self.number) else ""

    def loss(self) -> Loss:
        """The loss, as `RoundPipe.forward_backward` returns it; waiting for it is left to the caller.

        Raises:
            RoundPipeError: tasks are missing, so it will never be there.
        """
        missing = "" if self._loss.done() else self.missing()
        if missing:
            raise RoundPipeError(f"the loss needs all tasks of the iteration: {missing}; submit that, or abort()")
        return self._loss

    def abort(self) -> None:
        """Give up what runs, and the gradients of all iterations since the last step; the model goes on from there.

        Raises:
            RoundPipeError: the iteration is over (it was stepped, given up, or cancelled).
        """
        self._model.drop_open(self.number)


# --- events


@dataclass(frozen=True)
class TaskEvent:
    """A task is done, failed or was cancelled."""

    result: TaskResult


@dataclass(frozen=True)
class LossEvent:
    """All tasks of a call are done."""

    call: int
    loss: float


@dataclass(frozen=True)
class StepEvent:
    """A step is done."""

    info: StepInfo


@dataclass(frozen=True)
class FailureEvent:
    """The user's code raised; the next wait or call raises it too. `calls` and `steps` are cancelled."""

    error: BaseException
    calls: tuple[int, ...]
    steps: tuple[int, ...]


class Events:
    """What happens with a model from now on, in order; from `Model.events()`. Iterating waits, and ends with the model.

    Events are kept until they are taken or this object is gone.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._waiting: deque[TaskEvent | LossEvent | StepEvent | FailureEvent] = deque()

    def _put(self, event: TaskEvent | LossEvent | StepEvent | FailureEvent) -> None:
        self._waiting.append(event)

    def poll(self) -> list[TaskEvent | LossEvent | StepEvent | FailureEvent]:
        """What has happened since the last look, without waiting."""
        with self._model.client.lock:
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def get(self, timeout: float | None = None) -> TaskEvent | LossEvent | StepEvent | FailureEvent:
        """Wait for the next one.

        Raises:
            TimeoutError: none has come in `timeout` seconds.
            RoundPipeError: none will come: the model is closed.
        """
        if not self._model.client.wait(lambda: bool(self._waiting) or self._model.closed, "an event", timeout):
            raise TimeoutError(f"no event of model {self._model.name!r} within {timeout} s")
        with self._model.client.lock:
            if not self._waiting:
                raise RoundPipeError(f"model {self._model.name!r} is closed: no event will come")
            return self._waiting.popleft()

    def __iter__(self) -> Iterator[TaskEvent | LossEvent | StepEvent | FailureEvent]:
        while self._waiting or not self._model.closed:
            try:
                yield self.get()
            except RoundPipeError:
                if not self._model.closed:
                    raise
