"""`Model`: a model on a session, below `RoundPipe`: its weights, its calls and steps, what they leave behind."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rpruntime import closing, opening, records, succession
from rpruntime.books import Books
from rpruntime.calls import Calls
from rpruntime.checkpoints.checkpoints import CheckpointInfo, Checkpoints, SaveHandle
from rpruntime.control import events as ev
from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.iteration import Events, Iteration
from rpruntime.loading import Loan, ModelPackage
from rpruntime.metrics import Figures
from rpruntime.microbatch import take_labels
from rpruntime.preparing import Prepared, check_num_microbatches
from rpruntime.results import StepInfo
from rpruntime.script_model import ScriptModel
from rpruntime.script_optimizer import hyper_parameters, patch_optimizer
from rpruntime.script_weights import ScriptWeights
from rpruntime.state_reading import read_state
from rpruntime.store.handle import Payload
from rpruntime.store.values import put_together
from rpruntime.terminal import say
from rpruntime.wire.messages import ScalerState
from rpruntime.wire.succession import ModelState

if TYPE_CHECKING:
    from rpruntime.client import Client


class Model:
    """A model that the processes of a session have loaded; `client.load_model` makes one.

    Attributes:
        module: the script's model.
        optimizer: the script's optimizer, or None.
        name: of the model within its session.
        client: of the session.
        layout: where its parameters live.
        asynchronous: whether an iteration reads the weights of two steps before.
        grad_scaler: the loss scale, or None.
        user_state: anything that pickles; it stays with the model.
        books: what is pending.
        prepared: its settings.
        figures: of finished steps, for sinks and watchers.
        calls: batches on their way.
        checkpoints: its saves and loads.
        weights: the script's parameters.
        script: the script's modules.
        on_note: gets `NoteTimes` and `NoteShortage`, under the client's lock.
    """

    number: int
    """In its session."""
    seed: int
    loan: Loan
    """Weights that were in the session's memory before."""
    package: ModelPackage | None
    """What the processes load; replacements of workers read it. None: another program has made it."""
    weights: ScriptWeights
    script: ScriptModel
    checkpoints: Checkpoints
    calls: Calls
    figures: Figures
    _listener: Callable[[Any], None]

    def __init__(self, client: Client, prepared: Prepared, found: ModelState | None = None) -> None:
        self.closed = True  # until it is loaded
        self.client = client
        self.module, self.optimizer, self.name = prepared.module, prepared.optimizer, prepared.name
        self.layout, self.asynchronous = prepared.layout, prepared.asynchronous
        self.grad_scaler = prepared.grad_scaler
        self._user_state: Any = {}
        self.on_note: Callable[[Any], None] | None = None
        self.prepared = prepared
        self._quiet = bool(client.session.config.get("quiet"))
        self._said: set[str] = set()
        opening.replace_older(self, found)
        self.books = Books(self)
        self._requests = itertools.count(1)
        self.synchronized = False
        self.state_is_kept = False
        if found is None:
            opening.load(self, prepared)
        else:
            succession.take_over(self, prepared.recompute, found)
            self._user_state = records.load_part(client.session.folder, self.number, "user_state", {})
        self.closed = False
        if self.grad_scaler is not None:
            self.grad_scaler._bind(self)
        if self.optimizer is not None:
            patch_optimizer(self.optimizer, self)

    def __repr__(self) -> str:
        return f"<Model {self.name}, {len(self.layout.layers)} layers{', closed' * self.closed}>"

    def remember(self, part: str, value: Any) -> None:
        """Write down what only this program knows, for the one that goes on with the model in a served session."""
        if self.client.session.served:
            records.save_part(self.client.session.folder, self.number, part, value)

    # --- what it is

    @property
    def user_state(self) -> Any:
        """Anything that pickles; what was assigned last stays with the model when this program ends."""
        return self._user_state

    @user_state.setter
    def user_state(self, value: Any) -> None:
        self.remember("user_state", value)
        self._user_state = value

    @property
    def step_count(self) -> int:
        """Steps issued so far, those before a checkpoint that was loaded included."""
        with self.client.lock:
            return self.client.machine.step_number(self.number)

    @property
    def last_step(self) -> StepInfo | None:
        """The newest step that is done, without waiting."""
        return self.books.last_step

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layout.layers)

    def events(self) -> Events:
        """What happens with the model from now on: tasks, losses, steps, failures."""
        events = Events(self)
        with self.client.lock:
            self.books.listeners.add(events)
        return events

    @property
    def trains(self) -> bool:
        """Whether a parameter requires a gradient."""
        return bool(self.weights.trained)

    # --- calls

    def iteration(
        self,
        inputs: Any,
        labels: Any = None,
        *,
        num_microbatches: int = 8,
        scale: float = 1.0,
        num_items: float | None = None,
    ) -> Iteration:
        """Begin a training call whose tasks are submitted one by one; gradients add up until `step`.

        Waits, as `RoundPipe.forward_backward`, until the step before the last one is done. Arguments but
        `num_microbatches` are those of `forward_backward` too.

        Raises:
            ConfigError: the batch cannot be cut; nothing has happened.
            RoundPipeError: the iteration before lacks tasks.
            The user's own exception of an earlier call, once; the model stays usable.
        """
        self.begin_training(scale)
        check_num_microbatches(num_microbatches)
        if self.prepared.labels_in_dict:
            inputs, labels = take_labels(inputs, labels, keep=self.prepared.labels_to_model)
        cut = self.calls.cut(inputs, labels, num_microbatches, num_items=num_items)
        self.wait_for_turn()
        loss, call = self.calls.train(cut, None, has_labels=labels is not None, scale=float(scale))
        return Iteration(self, call, loss, len(cut.rows))

    def begin_training(self, scale: float) -> None:
        """Whether a training call makes sense now. Raises ConfigError, or the user's exception of an earlier call."""
        self.start_of_call()
        self._check_submitted("another iteration")
        if not self.weights.trained:
            raise ConfigError(
                "no parameter requires a gradient, so there is nothing to train: use pipe.forward or pipe.evaluate, or "
                "set requires_grad before wrapping the model"
            )
        if not self.module.training:
            self.say_once("the model is in eval mode while training: call model.train() if that is not meant")
        self.weights.check()
        self.script.check_training()
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ConfigError(f"scale must be a finite number, not {scale!r}")

    def wait_for_turn(self) -> None:
        """Wait until a call of the open iteration may be issued: until the step before the last one is done."""
        self.wait(lambda: len(self.client.machine.unfinished_steps(self.number)) < 2, "step t-2")
        self.raise_failure()

    # --- steps

    def step(self, layers: range | None = None, max_grad_norm: float | None = None) -> StepInfo:
        """Seal the iteration and queue the optimizer's step, with all groups' hyper-parameters as they are now.

        Never blocks. `max_grad_norm` clips the global norm as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            layers: None. All layers have the same version between two iterations, so a step of some alone is refused.
            max_grad_norm: of all layers' gradients together; None: no limit.

        Raises:
            RoundPipeError: there is nothing to step (no call since the last step), or an iteration lacks tasks.
        """
        self.start_of_call()
        if layers is not None:
            raise ConfigError(
                f"step(layers={layers!r}): a step takes all layers, as an iteration reads one version of all; leave "
                "layers out (parameters that never train get requires_grad=False before the model is loaded)"
            )
        if self.optimizer is None:
            raise ConfigError("this pipe has no optimizer: pass one to RoundPipe")
        if not self.books.open:
            raise RoundPipeError("step without gradients: nothing has been trained since the last one")
        self._check_submitted("a step")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive or None, not {max_grad_norm!r}")
        groups = self._hyper_parameters(self.optimizer)
        info = StepInfo(self.client, "a step")

        def book() -> ev.StepEvent:
            number = self.client.machine.iteration(self.number)
            calls = tuple(call for call, _, _ in self.books.open)
            rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
            self.books.steps[number] = (info, calls, rates)
            self.books.open = []
            self.synchronized = False
            self.weights.stale = True
            return ev.StepEvent(self.number, groups, max_grad_norm)

        self.act(book)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for
        for parameter in [p for p in self.optimizer.state if id(p) in self.weights.trained]:
            del self.optimizer.state[parameter]
        return info

    def _hyper_parameters(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
        return hyper_parameters(optimizer, self.weights.trained)

    def zero_grad(self) -> None:
        """Let running calls complete and discard the gradients that no step has taken."""
        self.start_of_call()
        self.finish_open_calls()

        def book() -> ev.DiscardEvent:
            for call, _, _ in self.books.open:
                self.books.finished.pop(call, None)
            self.books.open = []
            return ev.DiscardEvent(self.number)

        if self.books.open:
            self.act(book)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The unscaled fp32 gradients since the last step, by parameter name; waits for running calls."""
        self.start_of_call()
        self.finish_open_calls()
        calls = tuple(call for call, _, _ in self.books.open)
        if not calls:
            return {}
        return {
            self.layout.units[unit].params[index].name: value
            for (unit, index, _), value in self.read_state("gradients", calls).items()
        }

    def read_state(self, what: str, calls: tuple[int, ...] = ()) -> dict[tuple[int, int, str], Any]:
        """Values of the optimizer process by (unit, index, name); `what` as in `ReadStateMsg`."""
        return read_state(self, next(self._requests), what, calls)

    def _check_submitted(self, what: str) -> None:
        """Raises RoundPipeError if the newest call lacks tasks."""
        with self.client.lock:
            missing = self.client.machine.missing_tasks(self.number)
        if missing:
            raise RoundPipeError(f"{what} needs all tasks of the last iteration: {missing}; submit that, or abort()")

    def drop_incomplete(self) -> None:
        """Give the open iteration up if tasks of it are lacking; what is being cancelled is awaited first."""
        self.await_cancelled()
        with self.client.lock:
            missing = self.client.machine.missing_tasks(self.number)
        if missing:
            self.say("the last iteration lacks tasks: it is given up, with the gradients since the last step")
            self.drop_open()

    def drop_open(self, number: int | None = None) -> None:
        """Cancel what runs of the open iteration and discard its gradients. `number`: a call that must be in it.

        Raises:
            RoundPipeError: that call is over.
        """
        self.start_of_call()

        def book() -> ev.AbandonEvent | ev.DiscardEvent:
            machine = self.client.machine
            calls = [call for call, _, _ in self.books.open]
            if number is not None and number not in calls:
                raise RoundPipeError(f"iteration {number} is over: it was stepped, given up, or cancelled")
            running = any(machine.is_running(call) for call in calls)
            gone = machine.open_calls(self.number) if running else calls
            self.figures.forget_calls(tuple(gone))
            self.books.drop_calls(gone, lambda: RoundPipeError("cancelled: the iteration was given up"))
            return ev.AbandonEvent(self.number, False) if running else ev.DiscardEvent(self.number)

        if self.books.open or number is not None:
            self.act(book)
            self.await_cancelled()

    def finish_open_calls(self) -> None:
        """Wait for the calls of the open iteration. Raises RoundPipeError if tasks are missing."""
        self._check_submitted("this")
        for _, loss, _ in list(self.books.open):
            self.wait(loss.done, "running calls")
        self.raise_failure()

    def set_scaler(self, state: ScalerState, previous: float | None) -> None:
        """Take a loss scale over, from the next iteration on."""
        self.start_of_call()
        self.wait_for_steps()
        self.raise_failure()
        if self.books.open:
            raise RoundPipeError(
                "the losses of this iteration are scaled already: load the GradScaler's state before forward_backward, "
                "or after pipe.step() or pipe.zero_grad()"
            )
        self.act(lambda: ev.SetScalerEvent(self.number, state, previous))

    # --- weights

    def synchronize(self) -> None:
        """Wait for every step issued; until the next `step()` the script's parameters and buffers are the newest.

        They are live views in the model's dtype: clone to keep. Gradients that no step has taken stay.
        """
        self.start_of_call()
        self.wait(lambda: not self.client.machine.unfinished_steps(self.number), "the steps issued")
        self.raise_failure()
        self.weights.fetch()
        self.synchronized = True

    def state_dict(self) -> dict[str, Any]:
        """A copy of the weights and buffers after every step issued, by name."""
        self.synchronize()
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Replace weights and buffers by name, as `model.load_state_dict` would; the optimizer's state stays.

        Waits for running work and discards gradients that no step has taken. Returns what torch's returns:
        `missing_keys` and `unexpected_keys`.

        Raises:
            RuntimeError: as torch's, for a name or shape that does not fit; nothing has changed.
        """
        self.start_of_call()
        self.script.check()
        return self.checkpoints.load_weights(state, strict)

    def save_checkpoint(
        self, folder: str | os.PathLike[str], *, extra: Any = None, keep: int | None = None, wait: bool = False
    ) -> SaveHandle:
        """Save the state after the newest `step()`, in the background, as `folder/step-N`; returns at once.

        Weights, optimizer state, buffers, hyper-parameters as they are now, registered objects, Python's, NumPy's and
        torch's random state. Gradients that no step has taken are not saved.

        Args:
            folder: of the checkpoints; made if need be.
            extra: anything that pickles; `load_checkpoint` gives it back.
            keep: so many of the newest checkpoints stay, older ones go once the new one is complete (None: all).
            wait: return when it is complete.

        Raises:
            CheckpointError: `extra` or a registered object cannot be saved; with `wait`, also why nothing was written.
        """
        self.start_of_call()
        return self.checkpoints.save(folder, extra=extra, keep=keep, wait=wait)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> CheckpointInfo:
        """Go on from a checkpoint: the newest complete one in `folder`, or `folder` itself.

        Waits for running work and discards gradients that no step has taken. The continued run is the uninterrupted
        one, bit for bit. Load only files that you trust: they hold pickled objects.

        Raises:
            CheckpointError: there is none, it is damaged, or of another model or version; nothing has changed.
        """
        self.start_of_call()
        return self.checkpoints.load(folder)

    def decode(self, payload: Payload) -> Any:
        """A copy of a value in shared memory."""
        store = self.client.store
        return put_together(store.skeleton(payload), [store.tensor(handle).clone() for handle in payload.tensors])

    # --- the end

    def close(self) -> None:
        """End the model, not the session; the newest weights stay in the script's private memory.

        Whatever it raises, the model is closed and the session has forgotten it.
        """
        if not self.closed:
            closing.close(self)

    def close_after_error(self) -> None:
        """Do the steps that were asked for, cancel the rest; without another exception: the script has one already."""
        if not self.closed:
            closing.close_after_error(self)

    def detach(self, wait: bool = True) -> None:
        """Leave the model to the next program that attaches to the session.

        `wait`: running calls and steps finish, and gradients that no step has taken are kept; else they go, as with
        this process. What there is of `user_state` and of the optimizer's groups is written down with `wait`.
        """
        if not self.closed:
            succession.detach(self, wait=wait)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close_after_error()

    # --- waiting, failures

    def act(self, book: Callable[[], Any]) -> None:
        """Give the machine the event that `book` returns, unless a failure is to be raised or cleared away first."""
        done = False

        def book_if_clear() -> Any:
            nonlocal done
            if self.books.failure is not None or self.books.broken is not None:
                return None
            if self.client.machine.is_cancelling(self.number):
                return None
            done = True
            return book()

        while not done:
            self.client.act(book_if_clear)
            if not done:
                self.raise_failure()
                self.await_cancelled()

    def start_of_call(self) -> None:
        """Raises what ended the model, or the user's exception of an earlier call, once."""
        if self.closed:
            raise RoundPipeError(f"pipe {self.name!r} is closed: make a new one")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what an earlier call failed with, once everything that was cancelled is gone."""
        if self.books.broken is not None:
            raise self.books.broken
        if self.books.failure is not None:
            self.await_cancelled()
            failure, self.books.failure = self.books.failure, None
            raise failure

    def await_cancelled(self) -> None:
        """Wait until everything that a failure cancelled is gone."""
        self.client.wait(lambda: not self.client.machine.is_cancelling(self.number), "the end of a cancelled iteration")

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        """Wait until `ready()`, or until something has failed; False: the time is over."""
        books = self.books
        return self.client.wait(
            lambda: ready() or books.failure is not None or books.broken is not None, what, timeout_s
        )

    def wait_for_steps(self) -> None:
        """Wait until every step issued is done or cancelled."""
        self.client.wait(
            lambda: self.books.broken is not None or not self.client.machine.unfinished_steps(self.number),
            "the steps issued",
        )

    def say(self, line: str) -> None:
        """Tell the user, unless the session is quiet."""
        if not self._quiet:
            say(f"rpruntime: {line}")

    def say_once(self, line: str) -> None:
        """Tell the user what has not been told yet."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)
