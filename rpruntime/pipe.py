"""`RoundPipe`: the high-level pipe that a training script uses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rpruntime import losses
from rpruntime import session as sessions
from rpruntime.buffers import buffer_places
from rpruntime.checkpoint import CheckpointInfo, Checkpoints, SaveHandle, read_rows
from rpruntime.client import Client, client_of
from rpruntime.control import events as ev
from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.failures import install_excepthook, rebuild
from rpruntime.layout import ModelLayout, check_model, check_optimizer, lay_out, shown_class
from rpruntime.loading import Loader, Loan, ModelPackage, initial_buffers, point_parameters, put_bytes
from rpruntime.microbatch import CutCall, cut_call, merge_metrics, merge_outputs, take_labels
from rpruntime.models import saving
from rpruntime.models.generate import generate
from rpruntime.models.parts import follow_modes, is_causal_lm
from rpruntime.results import EvalResult, Loss, StepInfo
from rpruntime.scaler import choose_scaler
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Payload, TensorHandle
from rpruntime.store.layout import optimizer_layout
from rpruntime.store.limits import read_host_memory
from rpruntime.store.values import put_together, take_apart, why_not_picklable
from rpruntime.terminal import say
from rpruntime.tuning import Tuner
from rpruntime.wire.messages import (
    ErrorInfo,
    ReadStateMsg,
    RestoredMsg,
    RoleFailedMsg,
    ScalerState,
    SnapshotBegunMsg,
    SnapshotFailedMsg,
    StateMsg,
)
from rpruntime.worker.context import capture

log = logging.getLogger(__name__)

MAX_MICROBATCHES = 4096
ABANDON_TIMEOUT_S = 10.0
"""How long a pipe that is being closed waits for work that it has cancelled."""
EVALUATED_AHEAD = 2
"""Batches that `evaluate` queues while one is computed, so that no device waits between them."""
KEPT_STATE_FACTOR = 4
"""`close` takes the optimizer's state over where the host has room for so many fp32 copies of the parameters."""
_RECOMPUTE = ("stage", "layer")
_HYPER_TYPES = (int, float, bool, str, type(None))


class RoundPipe:
    """Trains a model whose layers run on whichever device is next (paper section 3).

    Args:
        model: an `nn.Sequential`, whose entries are the layers, or a causal LM of `transformers` (also in a peft
            model), on the CPU.
        optimizer: any torch optimizer that steps each parameter alone, made from the model's parameters.
        loss_fn: `loss_fn(outputs, labels)` -> mean over its micro-batch, or `(loss, {"metric": x})`. None: the last
            layer's output is the loss; for a causal LM `rp.losses.causal_lm`.
        num_microbatches: M; a batch is cut into that many. Never depends on the number of devices.
        dtype: floating parameters are cast to it (None: each parameter keeps its own); the optimizer's copy is fp32.
        grad_dtype: what a slot's fp32 sum of gradients is rounded to, once (default: the parameter's dtype).
        asynchronous: iteration t reads the weights after step t-2 (staleness 1), so the pipeline never drains.
        plan: "auto" or "layers" (one layer a stage), or an `ExecutionPlan`.
        grad_scaler: an `rp.GradScaler`; made by default where parameters that train or their gradients are float16.
        recompute: "stage" keeps the input of each backward stage, "layer" that of every layer (less device memory).
        loss_weight: `loss_weight(labels)` -> a micro-batch's weight, for example its unmasked tokens (default: what
            `loss_fn` has as attribute `loss_weight`).
        chunk_dims: dims along which arguments are cut, where it is not dim 0; None: not cut.
        seed: for `layer_seed` (default `torch.initial_seed()`).
        name: of the pipe within its session.
        session: where to run (default: this process's session, made if need be).

    Raises:
        ConfigError: something cannot be wrapped; names it and the line to change.
        HostMemoryError: the machine cannot hold the model; with the figures.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        num_microbatches: int = 8,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        asynchronous: bool = False,
        plan: str | ExecutionPlan = "auto",
        recompute: str = "stage",
        grad_scaler: Any = None,
        loss_weight: Callable[..., Any] | None = None,
        chunk_dims: dict[str | int, int | None] | None = None,
        compile: str = "off",
        seed: int | None = None,
        name: str = "default",
        session: Any = None,
    ) -> None:
        self._closed = True  # until the model is loaded
        self._check_settings(num_microbatches, recompute, compile, dtype, grad_dtype)
        check_model(model)
        if optimizer is not None:
            check_optimizer(optimizer, model)
        causal_lm = is_causal_lm(model)
        if causal_lm and loss_fn is None:
            loss_fn = losses.causal_lm
        self._labels_in_dict = causal_lm or loss_fn in losses.BUILT_IN
        chunked = loss_fn is losses.causal_lm_chunked
        if chunked and not causal_lm:
            raise ConfigError("causal_lm_chunked needs a causal LM of transformers: use rp.losses.LinearCrossEntropy")
        self._labels_to_model = chunked
        if loss_weight is None:
            loss_weight = getattr(loss_fn, "loss_weight", None)
        self.model, self.optimizer, self.name = model, optimizer, name
        self._loss_fn, self._loss_weight, self._chunk_dims = loss_fn, loss_weight, chunk_dims
        self._num_microbatches = num_microbatches
        self._asynchronous = asynchronous
        layout = lay_out(model, optimizer, dtype, grad_dtype, losses.chunked_head if chunked else None)
        fixed = plan_of(plan, len(layout.layers))
        self.grad_scaler = choose_scaler(grad_scaler, layout)
        if optimizer is not None and not any(unit.trainable for unit in layout.units):
            raise ConfigError(
                "the optimizer has nothing to train: no parameter of its groups requires a gradient; make it after the "
                "adapters (peft.get_peft_model, or PeftModel.from_pretrained with is_trainable=True), or set "
                "requires_grad before wrapping the model, or pass optimizer=None to evaluate only"
            )
        session = sessions.current() if session is None else session
        self._client: Client = client_of(session)
        memory = min(
            (int(info.get("memory_bytes", 0)) for info in session.ready.values() if "memory_bytes" in info), default=0
        )
        self._tuner = Tuner(len(layout.layers), len(session.worker_roles), memory, fixed)
        self._quiet = bool(session.config.get("quiet"))
        self._said: set[str] = set()
        self._replace_older_pipe(set(map(id, layout.parameters.values())))
        self._layout: ModelLayout = layout
        self._losses: dict[int, Loss] = {}
        self._steps: dict[int, tuple[StepInfo, tuple[int, ...], tuple[float, ...]]] = {}
        self._finished_calls: dict[int, ev.FinishCall] = {}
        self._open: list[tuple[int, Loss, float]] = []
        self._requests = itertools.count(1)
        self._states: tuple[int, list[StateMsg]] = (0, [])
        """A request and the parts of its answer."""
        self._failure: BaseException | None = None
        self._broken: BaseException | None = None
        self._synchronized = False
        self._state_is_kept = False
        self.last_step: StepInfo | None = None
        install_excepthook()
        self._load(optimizer, loss_fn, seed, recompute, asynchronous, cast=dtype is not None)
        self._closed = False
        if self.grad_scaler is not None:
            self.grad_scaler._bind(self)
        if optimizer is not None:
            _patch_optimizer(optimizer, self)

    def _check_settings(self, count: Any, recompute: str, compile: str, dtype: Any, grad_dtype: Any) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"num_microbatches must be a positive integer, not {count!r}")
        if count > MAX_MICROBATCHES:
            raise ConfigError(f"num_microbatches is {count}; {MAX_MICROBATCHES} at most, more calls a step do the rest")
        if recompute not in _RECOMPUTE:
            raise ConfigError(f"recompute must be one of {', '.join(_RECOMPUTE)}, not {recompute!r}")
        if compile != "off":
            raise ConfigError('compile is not supported yet; leave compile="off"')
        for setting, value in (("dtype", dtype), ("grad_dtype", grad_dtype)):
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ConfigError(f"{setting} must be a floating torch dtype such as torch.bfloat16, not {value!r}")

    def _replace_older_pipe(self, ids: set[int]) -> None:
        pipes: weakref.WeakValueDictionary[str, RoundPipe] = self._client.pipes
        older = pipes.get(self.name)
        if older is not None and not older._closed:
            self._say(f"pipe {self.name!r} is made again: the older one is closed (pass name= to have two)")
            try:
                older.close()
            except Exception:
                if older._broken is None:  # else it has been raised before
                    raise
        for other in list(pipes.values()):
            if not other._closed and not ids.isdisjoint(map(id, other._layout.parameters.values())):
                raise ConfigError(
                    f"pipe {other.name!r} has parameters of this model already, and both would write them back at "
                    "their end: close it first, or use it for both"
                )
        pipes[self.name] = self

    def _load(
        self, optimizer: Any, loss_fn: Any, seed: int | None, recompute: str, asynchronous: bool, *, cast: bool
    ) -> None:
        client = self._client
        loader = Loader(client, self._layout, self._quiet)
        self._loan = Loan(client, self._layout)
        try:
            loader.check_memory(optimizer, asynchronous, self._loan.nbytes)
        except BaseException:
            self._loan.cancel()
            raise
        self._listener: Callable[[Any], None] = loader.on_message
        self._model = client.add_listener(lambda msg: self._listener(msg))
        package: ModelPackage | None = None
        try:
            package = ModelPackage(
                client,
                self._layout,
                optimizer,
                loss_fn,
                model=self._model,
                name=self.name,
                seed=torch.initial_seed() if seed is None else seed,
                recompute=recompute,
                asynchronous=asynchronous,
                cast=cast,
                scaler=self._scaler_state(),
                lent=self._loan.extents,
            )
            client.wait_roles()
            allocated = loader.run(package)
        except BaseException:
            if package is not None:
                loader.undo(package)
            client.remove_listener(self._model)
            self._loan.cancel()
            raise
        self._package = package  # replacements of workers read it
        self._checkpoints = Checkpoints(self)
        self._listener = self._on_message
        self._modes = self._modes_now()
        client.do(
            ev.ModelAddedEvent(
                model=self._model,
                units=tuple(self._layout.units),
                layer_units=tuple(tuple(units) for units in self._layout.layer_units),
                buffers=initial_buffers(client, self._layout),
                grain=recompute,
                asynchronous=asynchronous,
                master=allocated.master,
                loss_scale=1.0 if (scaler := self._scaler_state()) is None else scaler.scale,
            )
        )
        self._point_parameters(dict(enumerate(allocated.master)))
        self._loan.begin()

    # --- training

    def forward_backward(
        self, inputs: Any, labels: Any = None, *, scale: float = 1.0, num_items: float | None = None
    ) -> Loss:
        """Queue forward, loss and backward of one batch; returns at once.

        Args:
            inputs: tuple -> `*args`, dict -> `**kwargs`, list -> micro-batches already cut, else one argument.
            labels: what `loss_fn` gets as second argument; None: it is called with the outputs alone. With a causal LM
                or a loss of `rp.losses` they may be the entry "labels" of the dict.
            scale: multiplies this call's gradients (not the loss that is returned).
            num_items: replaces the sum of weights (or rows) by the total of several calls.

        Raises:
            ConfigError: the batch cannot be cut; nothing has happened.
            The user's own exception of an earlier call, once; the run stays usable.
        """
        self._start_of_call()
        if not self._stepped:
            raise ConfigError(
                "no parameter requires a gradient, so there is nothing to train: use pipe.forward or pipe.evaluate, or "
                "set requires_grad before wrapping the model"
            )
        if not self.model.training:
            self._say_once("the model is in eval mode while training: call model.train() if that is not meant")
        self._check_parameters()
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ConfigError(f"scale must be a finite number, not {scale!r}")
        inputs, labels = self._take_labels(inputs, labels)
        cut = cut_call(
            inputs,
            labels,
            num_microbatches=self._num_microbatches,
            chunk_dims=self._chunk_dims,
            loss_weight=self._loss_weight,
            num_items=num_items,
        )
        if cut.warning:
            self._say_once(cut.warning)
        self._wait(lambda: len(self._client.machine.unfinished_steps(self._model)) < 2, "step t-2")
        self._raise_failure()
        if not self._open:
            self._choose_plan(len(cut.rows))
        loss = Loss(self, "the loss of a call")

        def book(call: int) -> None:
            self._open.append((call, loss, float(scale)))
            self._synchronized = False

        self._issue(cut, loss, book, has_labels=labels is not None, scale=float(scale))
        return loss

    def _issue(self, cut: CutCall, loss: Loss, book: Callable[[int], None], **settings: Any) -> None:
        """Copy a call's values into the arena and hand the call to the machine; `book` notes its number."""
        encoder = _Encoder(self._client, self._say_once)
        issued = False

        def issue() -> ev.CallEvent:
            nonlocal issued
            issued = True
            call = self._client.new_call(self._model)
            self._losses[call] = loss
            book(call)
            return dataclasses.replace(event, call=call)

        try:
            event = self._call_event(cut, encoder, **settings)
            self._act(issue)
        except BaseException:
            if not issued:
                encoder.free()
            raise

    def _act(self, book: Callable[[], Any]) -> None:
        """Give the machine the event that `book` returns, unless a failure is to be raised or cleared away first."""
        done = False

        def book_if_clear() -> Any:
            nonlocal done
            if self._failure is not None or self._broken is not None:
                return None
            if self._client.machine.is_cancelling(self._model):
                return None
            done = True
            return book()

        while not done:
            self._client.act(book_if_clear)
            if not done:
                self._raise_failure()
                self._failure_is_over()

    def _take_labels(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        return take_labels(inputs, labels, keep=self._labels_to_model) if self._labels_in_dict else (inputs, labels)

    def _modes_now(self) -> list[bytes]:
        follow_modes(self._layout.layers)
        return [_modes(layer) for layer in self._layout.layers]

    @property
    def plan(self) -> ExecutionPlan:
        """The stages of the open iteration."""
        return self._tuner.plan

    def _choose_plan(self, num_microbatches: int) -> None:
        with self._client.lock:
            iteration = self._client.machine.iteration(self._model)
            self._tuner.before_iteration(iteration, num_microbatches, asynchronous=self._asynchronous)
        if self._tuner.news:
            self._say(f"step {self._client.machine.step_number(self._model, iteration)}: {self._tuner.news}")
            self._tuner.news = ""

    def _call_event(
        self,
        cut: CutCall,
        encoder: _Encoder,
        *,
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
            model=self._model,
            plan=self.plan,
            inputs=tuple(inputs),
            labels=tuple(labels),
            coefficients=tuple((c.numerator, c.denominator) for c in cut.coefficients),
            weights=tuple(cut.weights),
            scale=scale,
            context=context,
            inference=inference,
            wants_output=wants_output,
        )

    def step(self, *, max_grad_norm: float | None = None) -> StepInfo:
        """Seal the iteration and queue the optimizer's step, with all groups' hyper-parameters as they are now.

        Never blocks. `max_grad_norm` clips the global norm as `torch.nn.utils.clip_grad_norm_` does.

        Raises:
            RoundPipeError: there is nothing to step (no `forward_backward` since the last step).
        """
        self._start_of_call()
        if self.optimizer is None:
            raise ConfigError("this pipe has no optimizer: pass one to RoundPipe")
        if not self._open:
            raise RoundPipeError("step without gradients: call pipe.forward_backward first")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive or None, not {max_grad_norm!r}")
        groups = self._hyper_parameters()
        info = StepInfo(self, "a step")

        def book() -> ev.StepEvent:
            number = self._client.machine.iteration(self._model)
            calls = tuple(call for call, _, _ in self._open)
            self._steps[number] = (info, calls, tuple(float(group["lr"]) for group in groups if "lr" in group))
            self._open = []
            self._synchronized = False
            return ev.StepEvent(self._model, groups, max_grad_norm)

        self._act(book)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for
        for parameter in [p for p in self.optimizer.state if id(p) in self._stepped]:
            del self.optimizer.state[parameter]
        return info

    def _hyper_parameters(self) -> tuple[dict[str, Any], ...]:
        assert self.optimizer is not None
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            if any(id(p) not in self._stepped for p in group["params"] if p.requires_grad):
                raise ConfigError(
                    f"param_groups[{number}] changed after the model was wrapped: add groups before RoundPipe"
                )
            plain: dict[str, Any] = {}
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.item()
                if isinstance(value, _HYPER_TYPES):
                    plain[key] = value
                elif (
                    isinstance(value, list | tuple)
                    and key != "params"
                    and all(isinstance(v, _HYPER_TYPES) for v in value)
                ):
                    plain[key] = tuple(value)
            groups.append(plain)
        return tuple(groups)

    def zero_grad(self) -> None:
        """Let running calls complete and discard the gradients that no step has taken."""
        self._start_of_call()
        self._finish_open_calls()

        def book() -> ev.DiscardEvent:
            for call, _, _ in self._open:
                self._finished_calls.pop(call, None)
            self._open = []
            return ev.DiscardEvent(self._model)

        if self._open:
            self._act(book)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The unscaled fp32 gradients since the last step, by parameter name; waits for running calls."""
        self._start_of_call()
        self._finish_open_calls()
        calls = tuple(call for call, _, _ in self._open)
        if not calls:
            return {}
        return {
            self._layout.units[unit].params[index].name: value
            for (unit, index, _), value in self._read_state("gradients", calls).items()
        }

    def _read_state(self, what: str, calls: tuple[int, ...] = ()) -> dict[tuple[int, int, str], Any]:
        request = next(self._requests)
        parts: list[StateMsg] = []
        self._states = (request, parts)
        self._client.send("optimizer", ReadStateMsg(self._model, request, what, calls))
        self._wait(lambda: bool(parts) and parts[-1].last, f"the optimizer's {what}")
        self._raise_failure()
        found: dict[tuple[int, int, str], Any] = {}
        for msg in parts:
            rows, extents = read_rows(self._client.store, msg)
            found.update(rows)
            self._client.free(extents)
        return found

    def _finish_open_calls(self) -> None:
        for _, loss, _ in list(self._open):
            self._wait(loss.done, "running calls")
        self._raise_failure()

    # --- evaluation

    def forward(self, inputs: Any, *, num_microbatches: int | None = None) -> Any:
        """What the model returns for `inputs`, merged; weights after every `step()` issued, eval mode, no gradients.

        Tensors are joined along the dim that was cut (`chunk_dims`), scalars averaged by rows, equal values kept.
        """
        self._start_of_call()
        if self._labels_in_dict:
            inputs, _ = take_labels(inputs, None, keep=False)
        cut = cut_call(
            inputs, None, num_microbatches=num_microbatches or self._num_microbatches, chunk_dims=self._chunk_dims
        )
        finished = self._infer(cut, has_labels=False, wants_output=True)
        try:
            outputs = [self._decode(payload) for payload in finished.outputs]
        finally:
            self._client.do(ev.OutputTakenEvent(finished.call))
        return merge_outputs(outputs, cut.rows, dims=cut.dims)

    def evaluate(self, batches: Iterable[Any], *, max_batches: int | None = None) -> EvalResult:
        """Weighted loss and metrics over `(inputs, labels)` batches, eval mode, no gradients, nothing kept.

        Args:
            batches: of `(inputs, labels)`, as for `forward_backward`, or of dicts with the entry "labels".
            max_batches: stop after that many.

        Raises:
            ConfigError: there was no batch.
        """
        running: deque[tuple[Loss, int]] = deque()
        try:
            return self._evaluate(batches, max_batches, running)
        finally:
            for result, number in running:  # after an exception: the session goes on without them
                with contextlib.suppress(Exception):
                    result._wait()
                self._finished_calls.pop(number, None)

    def _evaluate(
        self, batches: Iterable[Any], max_batches: int | None, running: deque[tuple[Loss, int]]
    ) -> EvalResult:
        finished: list[ev.FinishCall] = []
        if isinstance(batches, Mapping):
            raise ConfigError("evaluate takes an iterable of batches: for one batch, evaluate([batch])")
        for number, batch in enumerate(batches):
            if max_batches is not None and number >= max_batches:
                break
            self._start_of_call()
            inputs, labels = (batch, None) if isinstance(batch, Mapping) and self._labels_in_dict else batch
            inputs, labels = self._take_labels(inputs, labels)
            cut = cut_call(
                inputs,
                labels,
                num_microbatches=self._num_microbatches,
                chunk_dims=self._chunk_dims,
                loss_weight=self._loss_weight,
                may_be_zero=True,
            )
            if not any(cut.weights):
                continue
            running.append(self._start_inference(cut, has_labels=labels is not None, wants_output=False))
            if len(running) > EVALUATED_AHEAD:
                finished.append(self._end_inference(*running.popleft()))
        while running:
            finished.append(self._end_inference(*running.popleft()))
        if not finished:
            raise ConfigError("evaluate got no batch")
        rows, weights, total = [], [], 0.0
        for done in finished:
            for loss, metrics, weight in zip(done.losses, done.metrics, done.weights, strict=True):
                if weight:
                    total += loss * weight
                    rows.append(metrics)
                    weights.append(weight)
        return EvalResult(total / sum(weights), sum(weights), merge_metrics(rows, weights))

    def generate(
        self,
        input_ids: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Continue prompts of one length, to look at results; every token is a full forward, without a cache.

        Args:
            input_ids: [B, S] or [S].
            temperature: 0 takes the likeliest token; else tokens are drawn, with `seed`.
            eos_token_id: ends a row, which is then filled with it.

        Returns prompts and continuations, int64 [B, S + new] or [S + new].
        """

        def next_logits(ids: torch.Tensor) -> torch.Tensor:
            inputs = {"input_ids": ids, "logits_to_keep": 1} if is_causal_lm(self.model) else ids
            output = self.forward(inputs, num_microbatches=min(len(ids), self._num_microbatches))
            logits: torch.Tensor = getattr(output, "logits", output)[:, -1]
            return logits

        return generate(
            next_logits,
            input_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            eos_token_id=eos_token_id,
            seed=seed,
        )

    def _infer(self, cut: CutCall, *, has_labels: bool, wants_output: bool) -> ev.FinishCall:
        return self._end_inference(*self._start_inference(cut, has_labels=has_labels, wants_output=wants_output))

    def _start_inference(self, cut: CutCall, *, has_labels: bool, wants_output: bool) -> tuple[Loss, int]:
        result = Loss(self, "an evaluation call")
        numbers: list[int] = []
        self._issue(cut, result, numbers.append, has_labels=has_labels, inference=True, wants_output=wants_output)
        return result, numbers[0]

    def _end_inference(self, result: Loss, number: int) -> ev.FinishCall:
        result._wait()
        return self._finished_calls.pop(number)

    def _decode(self, payload: Payload) -> Any:
        store = self._client.store
        return put_together(store.skeleton(payload), [store.tensor(handle).clone() for handle in payload.tensors])

    # --- weights

    def synchronize(self) -> None:
        """Wait for every step issued; until the next `step()` the script's parameters and buffers are the newest.

        They are live views in the model's dtype: clone to keep. Gradients that no step has taken stay.
        """
        self._start_of_call()
        self._wait(lambda: not self._client.machine.unfinished_steps(self._model), "the steps issued")
        self._raise_failure()
        with self._client.lock:
            weights = self._client.machine.newest_weights(self._model)
        self._point_parameters(weights)
        self._fetch_buffers()
        self._synchronized = True

    def _point_parameters(self, weights: dict[int, Any]) -> None:
        point_parameters(self._client, self._layout, weights)
        self._versions = {id(parameter): parameter._version for parameter in self._layout.parameters.values()}
        self._stepped = {
            id(parameter)
            for (unit, _), parameter in self._layout.parameters.items()
            if self._layout.units[unit].trainable
        }

    def _check_parameters(self) -> None:
        for (unit, index), parameter in self._layout.parameters.items():
            if parameter._version != self._versions[id(parameter)]:
                self._versions[id(parameter)] = parameter._version
                raise ConfigError(
                    f"{self._layout.units[unit].params[index].name} was written to, which has no effect on the weights "
                    "that are trained: change the model before RoundPipe wraps it"
                )

    def _fetch_buffers(self) -> None:
        with self._client.lock:
            found = self._client.machine.newest_buffers(self._model)
        for position, payload in found.items():
            values = self._decode(payload)
            for name, owner, local in buffer_places(self._layout.layers[position]):
                old, new = owner._buffers[local], values[name]
                if (
                    old is not None
                    and new is not None
                    and old.shape == new.shape
                    and old.dtype == new.dtype
                    and old.is_contiguous()
                ):
                    with torch.no_grad():
                        old.copy_(new)
                else:
                    owner._buffers[local] = new

    # --- checkpoints (rpruntime/checkpoint.py)

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
        self._start_of_call()
        return self._checkpoints.save(folder, extra=extra, keep=keep, wait=wait)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> CheckpointInfo:
        """Go on from a checkpoint: the newest complete one in `folder`, or `folder` itself.

        Waits for running work and discards gradients that no step has taken. The continued run is the uninterrupted
        one, bit for bit. Load only files that you trust: they hold pickled objects.

        Raises:
            CheckpointError: there is none, it is damaged, or of another model or version; nothing has changed.
        """
        self._start_of_call()
        return self._checkpoints.load(folder)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Replace weights and buffers by name, as `model.load_state_dict` would; the optimizer's state stays.

        Waits for running work and discards gradients that no step has taken. Returns what torch's returns:
        `missing_keys` and `unexpected_keys`.

        Raises:
            RuntimeError: as torch's, for a name or shape that does not fit; nothing has changed.
        """
        self._start_of_call()
        return self._checkpoints.load_weights(state, strict)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` (scheduler, loader) that checkpoints take along, in order."""
        self._checkpoints.register(objects)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, merge_adapters: bool = False
    ) -> None:
        """Write the model of transformers, after every step issued, into a folder that transformers loads back equal.

        Of a peft model the adapters alone are written, in peft's format, or the full model with the adapters in its
        weights. The folder is written beside its place and then put there; other files in it stay.

        Args:
            folder: is made, or replaced.
            dtype: parameters are cast to it (default: as the model has them).
            merge_adapters: write the full model, with the adapters merged into its weights.

        Raises:
            ConfigError: the model is none of transformers.
        """
        if not self._closed:
            self.synchronize()
        saving.save(self.model, folder, dtype=dtype, merge_adapters=merge_adapters)

    def close(self) -> None:
        """End the pipe, not the session; the newest weights stay in the script's private memory.

        Whatever it raises, the pipe is closed and the session has forgotten the model.
        """
        if self._closed:
            return
        try:
            self._come_to_rest()
        finally:
            self._end()

    def _come_to_rest(self) -> None:
        """Wait for everything issued, and take what stays over."""
        failure = None
        try:
            self._failure_is_over()
            self.synchronize()
            self._finish_open_calls()
        except Exception as err:
            if self._broken is not None or not hasattr(err, "rp_context"):
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
        wide = sum(optimizer_layout(unit)[1] for unit in self._layout.units if unit.trainable)
        room = read_host_memory().available(self._client.session.config.get("host_memory"))[0]
        if KEPT_STATE_FACTOR * wide < room:
            _fill_state(self.optimizer, self)
            self._state_is_kept = True

    def _iteration(self) -> int:
        with self._client.lock:
            return self._client.machine.iteration(self._model)

    def _abandon(self, *, sealed: bool) -> None:
        """Cancel what still runs (`sealed`: also what steps wait for); waits a while for who does not answer."""
        self._client.do(ev.AbandonEvent(self._model, sealed))
        self._client.wait(
            lambda: not self._client.machine.is_cancelling(self._model), "the end of what ran", ABANDON_TIMEOUT_S
        )

    def _end(self) -> None:
        """Let go of everything, also where the session is gone."""
        with contextlib.suppress(RoundPipeError):
            self._abandon(sealed=True)
        try:
            self._loan.end(self._weights_shown())
        finally:
            self._closed = True
            if self.optimizer is not None:
                _unpatch_optimizer(self.optimizer, lost=self._iteration() > 0 and not self._state_is_kept)
            for pending in [*self._losses.values(), *(info for info, _, _ in self._steps.values())]:
                pending._cancel(lambda: RoundPipeError("cancelled: the pipe was closed while this was running"))
            try:
                self._checkpoints.finish(ending=True)
            finally:
                with contextlib.suppress(RoundPipeError):  # the session is gone, and the model with it
                    self._client.do(ev.ModelRemovedEvent(self._model))
                self._client.remove_listener(self._model)
                if not self._client.machine.replaced_workers:  # else one that starts right now may be reading it
                    self._package.free()

    def _weights_shown(self) -> dict[int, Any]:
        """Where the weights lie that the script's parameters show; of a session that has ended, the frozen ones."""
        with self._client.lock:
            newest = self._client.machine.newest_weights(self._model)
        units = self._layout.units
        return {unit: extent for unit, extent in newest.items() if self._synchronized or not units[unit].trainable}

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._close_after_error()

    def _close_after_error(self) -> None:
        """Do the steps that were asked for, cancel the rest; without another exception: the script has one already."""
        try:
            self._failure = None
            self._abandon(sealed=False)
            self.synchronize()
            self._keep_optimizer_state()
        except Exception as err:
            log.warning("closing pipe %s after an error: %s: %s", self.name, type(err).__name__, err)
        finally:
            with contextlib.suppress(Exception):
                self._end()

    # --- what happens elsewhere (under the client's lock)

    def _on_message(self, msg: Any) -> None:
        if isinstance(msg, ev.FinishCall):
            self._on_call_finished(msg)
        elif isinstance(msg, ev.FinishStep):
            self._on_step_finished(msg)
        elif isinstance(msg, ev.NoteTimes):
            self._tuner.observe(msg.spans, msg.peak_bytes)
        elif isinstance(msg, ev.NoteShortage):
            self._tuner.out_of_memory(range(*msg.layers))
        elif isinstance(msg, ev.ReportFailure):
            self._on_failure(msg)
        elif isinstance(msg, StateMsg):
            if msg.what == "snapshot":
                self._checkpoints.on_message(msg)
            elif msg.request == self._states[0]:
                self._states[1].append(msg)
            else:  # nobody waits for it any more
                self._client.free({handle.extent for *_, handle in msg.rows})
        elif isinstance(msg, ev.DropSave | SnapshotBegunMsg | SnapshotFailedMsg | RestoredMsg):
            self._checkpoints.on_message(msg)
        elif isinstance(msg, RoleFailedMsg):
            self._broken = self._broken or rebuild(msg.error, 0, self._client.machine.step_number(self._model))
            broken = self._broken
            for pending in [
                *self._losses.values(),
                *(info for info, _, _ in self._steps.values()),
            ]:
                pending._cancel(lambda: broken)
            self._checkpoints.fail(f"the run ended before its step was saved: {broken}")

    def _on_call_finished(self, msg: ev.FinishCall) -> None:
        loss = self._losses.pop(msg.call)
        self._finished_calls[msg.call] = msg
        for microbatch, value in enumerate(msg.losses):
            if value != value and self._note_nan(msg.call, microbatch):
                break
        loss._finish(msg.loss)

    def _note_nan(self, call: int, microbatch: int) -> bool:
        step = self._client.machine.step_number(self._model)
        self._say(f"the loss of micro-batch {microbatch + 1} is nan (call {call}, about step {step}); the run goes on")
        return True

    def _on_step_finished(self, msg: ev.FinishStep) -> None:
        done = msg.msg
        if self.grad_scaler is not None and done.scaler is not None:
            self.grad_scaler._follow(done.scaler, asynchronous=self._asynchronous)
        info, calls, lr = self._steps.pop(done.step)
        finished = [self._finished_calls.pop(call) for call in calls]
        metrics = [(m, w) for f in finished for m, w in zip(f.metrics, f.weights, strict=True) if w]
        info._finish(
            {
                "step": self._client.machine.step_number(self._model, done.step),
                "loss": sum(f.loss * f.scale for f in finished),
                "grad_norm": done.grad_norm,
                "skipped": done.skipped,
                "lr": lr,
                "loss_scale": done.loss_scale,
                "seconds": done.seconds,
                "metrics": merge_metrics([m for m, _ in metrics], [w for _, w in metrics]) if metrics else {},
            }
        )
        self.last_step = info

    def _on_failure(self, msg: ev.ReportFailure) -> None:
        call = msg.call
        step = self._client.machine.step_number(self._model, msg.steps[0] if msg.steps else None)
        cause = rebuild(self._named(msg.error), msg.num_microbatches, step)
        self._failure = self._failure or cause
        lost_steps = len(msg.steps)
        for number in msg.calls:
            if number in self._losses:
                self._losses.pop(number)._cancel(self._cancelled(cause, f"call {call}"))
            self._finished_calls.pop(number, None)
        for number in msg.steps:
            self._steps.pop(number)[0]._cancel(self._cancelled(cause, f"call {call}"))
        self._open = [entry for entry in self._open if entry[0] not in msg.calls]
        if lost_steps and hasattr(cause, "add_note"):
            cause.add_note(
                f"{lost_steps} step(s) issued after it were cancelled; scheduler steps taken meanwhile are not undone"
            )

    def _named(self, error: ErrorInfo) -> ErrorInfo:
        """With the names that who reported it does not know: the controller's machine knows numbers and roles."""
        roles = dict(zip(self._client.session.worker_roles, self._client.session.devices, strict=False))
        error = dataclasses.replace(error, device=roles.get(error.device, error.device))
        if error.layer < 0 or error.layer_name:
            return error
        name = f"{self._layout.names[error.layer]} ({shown_class(self._layout.layers[error.layer])})"
        return dataclasses.replace(error, layer_name=name)

    def _cancelled(self, cause: BaseException, where: str) -> Callable[[], BaseException]:
        def error() -> BaseException:
            if self._failure is cause:
                self._failure_is_over()
                self._failure = None
                return cause
            return RoundPipeError(f"cancelled: {type(cause).__name__} in {where}: {cause}")

        return error

    # --- small things

    def _start_of_call(self) -> None:
        if self._closed:
            raise RoundPipeError("this pipe is closed: make a new RoundPipe")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._failure is not None:
            self._failure_is_over()
            failure, self._failure = self._failure, None
            raise failure

    def _failure_is_over(self) -> None:
        """Wait until everything that a failure cancelled is gone."""
        self._client.wait(
            lambda: not self._client.machine.is_cancelling(self._model), "the end of a cancelled iteration"
        )

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        return self._client.wait(
            lambda: ready() or self._failure is not None or self._broken is not None, what, timeout_s
        )

    def _scaler_state(self) -> ScalerState | None:
        scaler = self.grad_scaler
        return scaler._state if scaler is not None and scaler.is_enabled() else None

    def _wait_for_steps(self) -> None:
        """Wait until every step issued is done or cancelled."""
        self._client.wait(
            lambda: self._broken is not None or not self._client.machine.unfinished_steps(self._model),
            "the steps issued",
        )

    def _set_scaler(self, state: ScalerState, previous: float | None) -> None:
        self._start_of_call()
        self._wait_for_steps()
        self._raise_failure()
        if self._open:
            raise RoundPipeError(
                "the losses of this iteration are scaled already: load the GradScaler's state before forward_backward, "
                "or after pipe.step() or pipe.zero_grad()"
            )
        self._act(lambda: ev.SetScalerEvent(self._model, state, previous))

    def _say(self, line: str) -> None:
        if not self._quiet:
            say(f"rpruntime: {line}")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def plan_of(plan: str | ExecutionPlan, num_layers: int) -> ExecutionPlan | None:
    """The plan that a setting fixes; None: "auto". Raises ConfigError."""
    if isinstance(plan, ExecutionPlan):
        plan.check_covers(num_layers)
        return plan
    if plan == "auto":
        return None
    if plan == "layers":
        return ExecutionPlan.one_layer_a_stage(num_layers)
    raise ConfigError(f'plan must be "auto", "layers" or an ExecutionPlan, not {plan!r}')


def _modes(layer: nn.Module) -> bytes:
    return bytes(module.training for module in layer.modules())


class _Encoder:
    """Copies one call's values into the controller's arena; a tensor that goes to every micro-batch is copied once."""

    def __init__(self, client: Client, say_once: Callable[[str], None]) -> None:
        self._client = client
        self._say_once = say_once
        self._seen: dict[int, tuple[torch.Tensor, TensorHandle]] = {}
        self._bodies: list[TensorHandle] = []

    def free(self) -> None:
        """Give everything back: the call is not made."""
        for handle in [*(handle for _, handle in self._seen.values()), *self._bodies]:
            self._client.arena.free(handle.extent)

    def encode(self, value: Any, what: str) -> Payload:
        try:
            skeleton, tensors = take_apart(value)
        except Exception as err:
            raise ConfigError(f"{why_not_picklable(value, what)}; it cannot travel to a worker") from err
        body: bytes | TensorHandle = skeleton
        if len(skeleton) > MAX_INLINE_SKELETON_BYTES:
            body = put_bytes(self._client, skeleton)
            self._bodies.append(body)
        return Payload(body, tuple(self._put(tensor) for tensor in tensors), (False,) * len(tensors))

    def _put(self, tensor: torch.Tensor) -> TensorHandle:
        found = self._seen.get(id(tensor))
        if found is None:
            if tensor.device.type != "cpu":
                self._say_once(f"a batch on {tensor.device} is copied to the host first: leave batches on the CPU")
            if tensor.layout is not torch.strided:
                raise ConfigError(f"a batch holds a tensor of layout {tensor.layout}; only dense tensors can travel")
            handle = self._client.arena.allocate_tensor(tuple(tensor.shape), tensor.dtype)
            self._client.store.tensor(handle).copy_(tensor.detach())
            found = self._seen[id(tensor)] = (tensor, handle)
        return found[1]


def _patch_optimizer(optimizer: torch.optim.Optimizer, pipe: RoundPipe) -> None:
    """`step` and `state_dict` of the script's optimizer, whose real state is in the optimizer process."""
    owner = weakref.ref(pipe)

    def step(*args: Any, **kwargs: Any) -> Any:
        raise RoundPipeError("the optimizer runs in a process of its own: call pipe.step() instead of optimizer.step()")

    def state_dict() -> dict[str, Any]:
        found = owner()
        if found is None or not found._synchronized:
            raise RoundPipeError("the optimizer's state is in another process: call pipe.synchronize() first")
        _fill_state(optimizer, found)
        return type(optimizer).state_dict(optimizer)

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        raise RoundPipeError(
            "the optimizer's state is in another process: call optimizer.load_state_dict(...) before RoundPipe, or "
            "pipe.load_checkpoint(folder)"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers leave it alone and do not warn
    optimizer.step = step  # type: ignore[method-assign]
    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _fill_state(optimizer: torch.optim.Optimizer, pipe: RoundPipe) -> None:
    """The optimizer process's state into the script's optimizer."""
    for (unit, index, name), value in pipe._read_state("state").items():
        optimizer.state[pipe._layout.parameters[unit, index]][name] = value


def _unpatch_optimizer(optimizer: torch.optim.Optimizer, *, lost: bool) -> None:
    for name in ("step", "state_dict", "load_state_dict"):
        optimizer.__dict__.pop(name, None)
    if not lost:
        return

    def state_dict() -> dict[str, Any]:
        raise RoundPipeError(
            "the optimizer's state went with its pipe: call pipe.synchronize() and optimizer.state_dict() before "
            "pipe.close()"
        )

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
