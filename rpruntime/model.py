"""`Model`: a model on a session, below `RoundPipe`: its weights, its calls and steps, what they leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rpruntime.books import Books
from rpruntime.checkpoint import CheckpointInfo, Checkpoints, SaveHandle, read_rows
from rpruntime.control import events as ev
from rpruntime.encoder import Encoder
from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.failures import install_excepthook
from rpruntime.iteration import Events, Iteration
from rpruntime.loading import Loader, Loan, ModelPackage, initial_buffers
from rpruntime.metrics import Figures
from rpruntime.microbatch import CutCall, cut_call, take_labels
from rpruntime.models.parts import follow_modes
from rpruntime.preparing import Prepared
from rpruntime.results import Loss, StepInfo
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.script_optimizer import fill_state, hyper_parameters, patch_optimizer, unpatch_optimizer
from rpruntime.script_weights import ScriptWeights
from rpruntime.store.handle import Payload
from rpruntime.store.layout import optimizer_layout
from rpruntime.store.limits import read_host_memory
from rpruntime.store.values import put_together
from rpruntime.terminal import say
from rpruntime.wire.messages import ReadStateMsg, ScalerState, StateMsg
from rpruntime.worker.context import capture

if TYPE_CHECKING:
    from rpruntime.client import Client

log = logging.getLogger(__name__)

MAX_MICROBATCHES = 4096
ABANDON_TIMEOUT_S = 10.0
"""How long a model that is being closed waits for work that it has cancelled."""
KEPT_STATE_FACTOR = 4
"""`close` takes the optimizer's state over where the host has room for so many fp32 copies of the parameters."""


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
        figures: of finished steps, for sinks and watchers.
        checkpoints: its saves and loads.
        on_note: gets `NoteTimes` and `NoteShortage`, under the client's lock.
    """

    def __init__(self, client: Client, prepared: Prepared) -> None:
        self.closed = True  # until it is loaded
        self.client = client
        self.module, self.optimizer, self.name = prepared.module, prepared.optimizer, prepared.name
        self.layout, self.asynchronous = prepared.layout, prepared.asynchronous
        self.grad_scaler = prepared.grad_scaler
        self.user_state: Any = {}
        self.on_note: Callable[[Any], None] | None = None
        self._prepared = prepared
        self._quiet = bool(client.session.config.get("quiet"))
        self._said: set[str] = set()
        self._replace_older()
        self.books = Books(self)
        self._requests = itertools.count(1)
        self.synchronized = False
        self._state_is_kept = False
        install_excepthook()
        self._load(prepared)
        self.closed = False
        if self.grad_scaler is not None:
            self.grad_scaler._bind(self)
        if self.optimizer is not None:
            patch_optimizer(self.optimizer, self)

    def _replace_older(self) -> None:
        models = self.client.models
        older = models.get(self.name)
        if older is not None and not older.closed:
            self.say(f"pipe {self.name!r} is made again: the older one is closed (pass name= to have two)")
            try:
                older.close()
            except Exception:
                if older.books.broken is None:  # else it has been raised before
                    raise
        ids = set(map(id, self.layout.parameters.values()))
        for other in list(models.values()):
            if not other.closed and not ids.isdisjoint(map(id, other.layout.parameters.values())):
                raise ConfigError(
                    f"pipe {other.name!r} has parameters of this model already, and both would write them back at "
                    "their end: close it first, or use it for both"
                )
        models[self.name] = self

    def _load(self, prepared: Prepared) -> None:
        client = self.client
        loader = Loader(client, self.layout, self._quiet)
        self.loan = Loan(client, self.layout)
        try:
            loader.check_memory(self.optimizer, self.asynchronous, self.loan.nbytes)
        except BaseException:
            self.loan.cancel()
            raise
        self._listener: Callable[[Any], None] = loader.on_message
        self.number = client.add_listener(lambda msg: self._listener(msg))
        package: ModelPackage | None = None
        scaler = self._scaler_state()
        try:
            package = ModelPackage(
                client,
                self.layout,
                self.optimizer,
                prepared.loss_fn,
                model=self.number,
                name=self.name,
                seed=torch.initial_seed() if prepared.seed is None else prepared.seed,
                recompute=prepared.recompute,
                asynchronous=self.asynchronous,
                cast=prepared.cast,
                scaler=scaler,
                lent=self.loan.extents,
            )
            client.wait_roles()
            allocated = loader.run(package)
        except BaseException:
            if package is not None:
                loader.undo(package)
            client.remove_listener(self.number)
            self.loan.cancel()
            raise
        self.package = package  # replacements of workers read it
        self.checkpoints = Checkpoints(self)
        self._listener = self.books.on_message
        self._modes = self._modes_now()
        client.do(
            ev.ModelAddedEvent(
                model=self.number,
                units=tuple(self.layout.units),
                layer_units=tuple(tuple(units) for units in self.layout.layer_units),
                buffers=initial_buffers(client, self.layout),
                grain=prepared.recompute,
                asynchronous=self.asynchronous,
                master=allocated.master,
                loss_scale=1.0 if scaler is None else scaler.scale,
            )
        )
        self.weights = ScriptWeights(self, dict(enumerate(allocated.master)))
        self.figures = Figures(self)
        self.loan.begin()

    # --- what it is

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

    def cut(
        self,
        inputs: Any,
        labels: Any,
        num_microbatches: int,
        *,
        num_items: float | None = None,
        may_be_zero: bool = False,
    ) -> CutCall:
        """Cut a batch into micro-batches. Raises ConfigError: it cannot be cut; nothing has happened."""
        prepared = self._prepared
        cut = cut_call(
            inputs,
            labels,
            num_microbatches=num_microbatches,
            chunk_dims=prepared.chunk_dims,
            loss_weight=prepared.loss_weight,
            num_items=num_items,
            may_be_zero=may_be_zero,
        )
        if cut.warning:
            self.say_once(cut.warning)
        return cut

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
        if self._prepared.labels_in_dict:
            inputs, labels = take_labels(inputs, labels, keep=self._prepared.labels_to_model)
        cut = self.cut(inputs, labels, num_microbatches, num_items=num_items)
        self.wait_for_turn()
        loss, call = self.train(cut, None, has_labels=labels is not None, scale=float(scale))
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
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ConfigError(f"scale must be a finite number, not {scale!r}")

    def wait_for_turn(self) -> None:
        """Wait until a call of the open iteration may be issued: until the step before the last one is done."""
        self.wait(lambda: len(self.client.machine.unfinished_steps(self.number)) < 2, "step t-2")
        self.raise_failure()

    def train(self, cut: CutCall, plan: ExecutionPlan | None, *, has_labels: bool, scale: float) -> tuple[Loss, int]:
        """Issue a training call under a plan, or one whose tasks are to come; its loss and its number."""
        loss = Loss(self.client, "the loss of a call")
        stages = "tasks"
        if plan is not None:
            stages = f"{len(plan.forward)} forward, {len(plan.backward)} backward stages"

        numbers: list[int] = []

        def book(call: int) -> None:
            numbers.append(call)
            self.books.open.append((call, loss, scale))
            self.figures.note_call(call, cut, stages)
            self.synchronized = False

        self._issue(cut, loss, book, plan=plan, has_labels=has_labels, scale=scale)
        return loss, numbers[0]

    def start_inference(
        self, cut: CutCall, plan: ExecutionPlan, *, has_labels: bool, wants_output: bool
    ) -> tuple[Loss, int]:
        """Issue a forward pass in eval mode: its result and its number, for `end_inference`."""
        result = Loss(self.client, "an evaluation call")
        numbers: list[int] = []
        self._issue(
            cut,
            result,
            numbers.append,
            plan=plan,
            has_labels=has_labels,
            inference=True,
            wants_output=wants_output,
        )
        return result, numbers[0]

    def end_inference(self, result: Loss, number: int) -> ev.FinishCall:
        """Wait for a forward pass."""
        result._wait()
        return self.books.finished.pop(number)

    def infer(self, cut: CutCall, plan: ExecutionPlan) -> list[Any]:
        """What the model returns for each micro-batch, with the weights after every step issued."""
        finished = self.end_inference(*self.start_inference(cut, plan, has_labels=False, wants_output=True))
        try:
            return [self.decode(payload) for payload in finished.outputs]
        finally:
            self.client.do(ev.OutputTakenEvent(finished.call))

    def _issue(self, cut: CutCall, loss: Loss, book: Callable[[int], None], **settings: Any) -> None:
        """Copy a call's values into the arena and hand the call to the machine; `book` notes its number."""
        encoder = Encoder(self.client, self.say_once)
        issued = False

        def issue() -> ev.CallEvent:
            nonlocal issued
            issued = True
            call = self.client.new_call(self.number)
            self.books.losses[call] = loss
            book(call)
            return dataclasses.replace(event, call=call)

        try:
            event = self._call_event(cut, encoder, **settings)
            self.act(issue)
        except BaseException:
            if not issued:
                encoder.free()
            raise

    def _call_event(
        self,
        cut: CutCall,
        encoder: Encoder,
        *,
        plan: ExecutionPlan | None,
        has_labels: bool,
        scale: float = 1.0,
        inference: bool = False,
        wants_output: bool = False,
    ) -> ev.CallEvent:
        context = capture()
        modes = enumerate(self._modes_now())
        context["modes"] = tuple((p, flags) for p, flags in modes if flags != self._modes[p])
        inputs = [encoder.encode((args, kwargs), "inputs") for args, kwargs in zip(cut.args, cut.kwargs, strict=True)]
        labels = [encoder.encode(label, "labels") if has_labels else None for label in cut.labels]
        return ev.CallEvent(
            call=0,
            model=self.number,
            plan=plan,
            inputs=tuple(inputs),
            labels=tuple(labels),
            coefficients=tuple((c.numerator, c.denominator) for c in cut.coefficients),
            weights=tuple(cut.weights),
            scale=scale,
            context=context,
            inference=inference,
            wants_output=wants_output,
        )

    def _modes_now(self) -> list[bytes]:
        follow_modes(self.layout.layers)
        return [_modes(layer) for layer in self.layout.layers]

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
            raise RoundPipeError("step without gradients: call pipe.forward_backward first")
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
        request = next(self._requests)
        parts: list[StateMsg] = []
        self.books.asked = (request, parts)
        self.client.send("optimizer", ReadStateMsg(self.number, request, what, calls))
        self.wait(lambda: bool(parts) and parts[-1].last, f"the optimizer's {what}")
        self.raise_failure()
        found: dict[tuple[int, int, str], Any] = {}
        for msg in parts:
            rows, extents = read_rows(self.client.store, msg)
            found.update(rows)
            self.client.free(extents)
        return found

    def _check_submitted(self, what: str) -> None:
        """Raises RoundPipeError if the newest call lacks tasks."""
        with self.client.lock:
            missing = self.client.machine.missing_tasks(self.number)
        if missing:
            raise RoundPipeError(f"{what} needs all tasks of the last iteration: {missing}; submit that, or abort()")

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
            gone = [*calls, *self.books.losses] if running else calls  # an evaluation that runs beside it goes too
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

    def _scaler_state(self) -> ScalerState | None:
        scaler = self.grad_scaler
        return scaler._state if scaler is not None and scaler.is_enabled() else None

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
        if self.closed:
            return
        try:
            self._come_to_rest()
        finally:
            self._end()

    def close_after_error(self) -> None:
        """Do the steps that were asked for, cancel the rest; without another exception: the script has one already."""
        if self.closed:
            return
        try:
            self.books.failure = None
            self._abandon(sealed=False)
            self.synchronize()
            self._keep_optimizer_state()
        except Exception as err:
            log.warning("closing pipe %s after an error: %s: %s", self.name, type(err).__name__, err)
        finally:
            with contextlib.suppress(Exception):
                self._end()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close_after_error()

    def _come_to_rest(self) -> None:
        """Wait for everything issued, and take what stays over."""
        failure = None
        try:
            self.await_cancelled()
            if self.client.machine.missing_tasks(self.number):
                self.say("the last iteration lacks tasks: it is given up, with the gradients since the last step")
                self.drop_open()
            self.synchronize()
            self.finish_open_calls()
        except Exception as err:
            if self.books.broken is not None or not hasattr(err, "rp_context"):
                raise
            failure = err
            self.synchronize()  # the weights are those before the iteration that failed
        self._keep_optimizer_state()
        if failure is not None:
            raise failure

    def _keep_optimizer_state(self) -> None:
        """Into the script's optimizer, where its memory is no burden; else asking for it later is an error."""
        if self.optimizer is None or self._iteration() == 0:
            return
        wide = sum(optimizer_layout(unit)[1] for unit in self.layout.units if unit.trainable)
        room = read_host_memory().available(self.client.session.config.get("host_memory"))[0]
        if KEPT_STATE_FACTOR * wide < room:
            fill_state(self.optimizer, self)
            self._state_is_kept = True

    def _iteration(self) -> int:
        with self.client.lock:
            return self.client.machine.iteration(self.number)

    def _abandon(self, *, sealed: bool) -> None:
        """Cancel what still runs (`sealed`: also what steps wait for); waits a while for who does not answer."""
        self.client.do(ev.AbandonEvent(self.number, sealed))
        self.client.wait(
            lambda: not self.client.machine.is_cancelling(self.number), "the end of what ran", ABANDON_TIMEOUT_S
        )

    def _end(self) -> None:
        """Let go of everything, also where the session is gone."""
        with contextlib.suppress(RoundPipeError):
            self._abandon(sealed=True)
        try:
            self.loan.end(self.weights.shown(everything=self.synchronized))
        finally:
            self.closed = True
            if self.optimizer is not None:
                unpatch_optimizer(self.optimizer, lost=self._iteration() > 0 and not self._state_is_kept)
            self.books.cancel_all(lambda: RoundPipeError("cancelled: the pipe was closed while this was running"))
            self.figures.close()
            try:
                self.checkpoints.finish(ending=True)
            finally:
                with contextlib.suppress(RoundPipeError):  # the session is gone, and the model with it
                    self.client.do(ev.ModelRemovedEvent(self.number))
                self.client.remove_listener(self.number)
                if not self.client.machine.replaced_workers:  # else one that starts right now may be reading it
                    self.package.free()

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
            raise RoundPipeError("this pipe is closed: make a new RoundPipe")
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


def check_num_microbatches(count: Any) -> None:
    """Raises ConfigError for a number of micro-batches that no call may have."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"num_microbatches must be a positive integer, not {count!r}")
    if count > MAX_MICROBATCHES:
        raise ConfigError(f"num_microbatches is {count}; {MAX_MICROBATCHES} at most, more calls a step do the rest")


def _modes(layer: nn.Module) -> bytes:
    return bytes(module.training for module in layer.modules())
