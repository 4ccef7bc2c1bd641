"""`RoundPipe`: the high-level pipe that a training script uses. Cutting, plans and habits; the rest is a `Model`."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rpruntime import records
from rpruntime import session as sessions
from rpruntime.checkpoints.checkpoints import CheckpointInfo, SaveHandle
from rpruntime.client import Client, client_of
from rpruntime.control import events as ev
from rpruntime.errors import ConfigError
from rpruntime.metrics import Sink
from rpruntime.microbatch import merge_metrics, merge_outputs, take_labels
from rpruntime.model import Model
from rpruntime.models import saving
from rpruntime.models.generate import generate, prompted
from rpruntime.preparing import check_num_microbatches, prepare
from rpruntime.results import EvalResult, Loss, StepInfo
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.terminal import saying
from rpruntime.trace.handle import Trace
from rpruntime.tuning import Tuner

EVALUATED_AHEAD = 2
"""Batches that `evaluate` queues while one is computed, so that no device waits between them."""


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
        check_num_microbatches(num_microbatches)
        if compile != "off":
            raise ConfigError('compile is not supported yet; leave compile="off"')
        prepared = prepare(
            model,
            optimizer,
            name=name,
            dtype=dtype,
            grad_dtype=grad_dtype,
            loss_fn=loss_fn,
            loss_weight=loss_weight,
            chunk_dims=chunk_dims,
            asynchronous=asynchronous,
            recompute=recompute,
            grad_scaler=grad_scaler,
            seed=seed,
        )
        num_layers = len(prepared.layout.layers)
        fixed = plan_of(plan, num_layers)
        self._labels_in_dict, self._labels_to_model = prepared.labels_in_dict, prepared.labels_to_model
        self._num_microbatches = num_microbatches
        session = sessions.current() if session is None else session
        client = client_of(session)
        self._tuner = Tuner(num_layers, len(session.worker_roles), _least_memory(session), fixed)
        self._model = Model(client, prepared)
        self._model.on_note = self._on_note
        self._model.remember("pipe", (num_microbatches, fixed))

    @classmethod
    def attach(cls, session: Any = None, name: str = "default") -> RoundPipe:
        """The pipe of this name that another program has left in a served session, as it was when it was made.

        `model` and `optimizer` are new objects with the same weights; `user_state` is what was assigned last.

        Args:
            session: as for `rp.Client.attach`.
            name: of the pipe.

        Raises:
            ConfigError: there is no such session, or another program controls it; says which.
            KeyError: there is no such pipe; names those there are.
        """
        client = Client.attach(session)
        model = client.models[name]
        pipe = cls.__new__(cls)
        folder = client.session.folder
        pipe._num_microbatches, fixed = records.load_part(folder, model.number, "pipe", (8, None))
        prepared = model.prepared
        pipe._labels_in_dict, pipe._labels_to_model = prepared.labels_in_dict, prepared.labels_to_model
        pipe._tuner = Tuner(model.num_layers, len(client.session.worker_roles), _least_memory(client.session), fixed)
        pipe._model = model
        model.on_note = pipe._on_note
        return pipe

    @property
    def step_count(self) -> int:
        """Steps issued so far, those of other programs and before a checkpoint that was loaded included."""
        return self._model.step_count

    @property
    def user_state(self) -> Any:
        """Anything that pickles; what was assigned last stays with the pipe when this program ends."""
        return self._model.user_state

    @user_state.setter
    def user_state(self, value: Any) -> None:
        self._model.user_state = value

    @property
    def model(self) -> nn.Module:
        """The script's model."""
        return self._model.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The script's optimizer."""
        return self._model.optimizer

    @property
    def name(self) -> str:
        """Of the pipe within its session."""
        return self._model.name

    @property
    def grad_scaler(self) -> Any:
        """The loss scale, or None."""
        return self._model.grad_scaler

    @property
    def last_step(self) -> StepInfo | None:
        """The newest step that is done, without waiting."""
        return self._model.last_step

    @property
    def plan(self) -> ExecutionPlan:
        """The stages of the open iteration."""
        return self._tuner.plan

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
        model = self._model
        model.begin_training(scale)
        inputs, labels = self._take_labels(inputs, labels)
        cut = model.calls.cut(inputs, labels, self._num_microbatches, num_items=num_items)
        model.wait_for_turn()
        if not model.books.open:
            self._choose_plan(len(cut.rows))
        return model.calls.train(cut, self.plan, has_labels=labels is not None, scale=float(scale))[0]

    def _take_labels(self, inputs: Any, labels: Any) -> tuple[Any, Any]:
        return take_labels(inputs, labels, keep=self._labels_to_model) if self._labels_in_dict else (inputs, labels)

    def _choose_plan(self, num_microbatches: int) -> None:
        model = self._model
        with model.client.lock:
            iteration = model.client.machine.iteration(model.number)
            self._tuner.before_iteration(iteration, num_microbatches, asynchronous=model.asynchronous)
        if self._tuner.news:
            model.say(f"step {model.step_count}: {self._tuner.news}")
            self._tuner.news = ""

    def _on_note(self, note: ev.NoteTimes | ev.NoteShortage) -> None:
        if isinstance(note, ev.NoteTimes):
            self._tuner.observe(note.spans, note.peak_bytes)
        else:
            self._tuner.out_of_memory(range(*note.layers))

    def step(self, *, max_grad_norm: float | None = None) -> StepInfo:
        """Seal the iteration and queue the optimizer's step, with all groups' hyper-parameters as they are now.

        Never blocks. `max_grad_norm` clips the global norm as `torch.nn.utils.clip_grad_norm_` does.

        Raises:
            RoundPipeError: there is nothing to step (no `forward_backward` since the last step).
        """
        return self._model.step(max_grad_norm=max_grad_norm)

    def zero_grad(self) -> None:
        """Let running calls complete and discard the gradients that no step has taken."""
        self._model.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The unscaled fp32 gradients since the last step, by parameter name; waits for running calls."""
        return self._model.gradients()

    # --- evaluation

    def forward(self, inputs: Any, *, num_microbatches: int | None = None) -> Any:
        """What the model returns for `inputs`, merged; weights after every `step()` issued, eval mode, no gradients.

        Tensors are joined along the dim that was cut (`chunk_dims`), scalars averaged by rows, equal values kept.
        """
        self._model.start_of_call()
        if self._labels_in_dict:
            inputs, _ = take_labels(inputs, None, keep=False)
        cut = self._model.calls.cut(inputs, None, num_microbatches or self._num_microbatches, has_loss=False)
        return merge_outputs(self._model.calls.infer(cut, self.plan), cut.rows, dims=cut.dims)

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
                self._model.books.finished.pop(number, None)

    def _evaluate(
        self, batches: Iterable[Any], max_batches: int | None, running: deque[tuple[Loss, int]]
    ) -> EvalResult:
        finished: list[ev.FinishCall] = []
        if isinstance(batches, Mapping):
            raise ConfigError("evaluate takes an iterable of batches: for one batch, evaluate([batch])")
        for number, batch in enumerate(batches):
            if max_batches is not None and number >= max_batches:
                break
            self._model.start_of_call()
            inputs, labels = (batch, None) if isinstance(batch, Mapping) and self._labels_in_dict else batch
            inputs, labels = self._take_labels(inputs, labels)
            cut = self._model.calls.cut(inputs, labels, self._num_microbatches, may_be_zero=True)
            if not any(cut.weights):
                continue
            labelled = labels is not None
            running.append(self._model.calls.start_inference(cut, self.plan, has_labels=labelled, wants_output=False))
            if len(running) > EVALUATED_AHEAD:
                finished.append(self._model.calls.end_inference(*running.popleft()))
        while running:
            finished.append(self._model.calls.end_inference(*running.popleft()))
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
        attention_mask: Any = None,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Continue prompts, to look at results; every token is a full forward, without a cache.

        Args:
            input_ids: [B, S] or [S], or what a tokenizer returns (`input_ids` and `attention_mask`).
            attention_mask: of the same shape, 0 for padding, which has to be on the left; None: there is none.
            temperature: 0 takes the likeliest token; else tokens are drawn, with `seed`.
            eos_token_id: ends a row, which is then filled with it.

        Returns prompts and continuations, int64 [B, S + new] or [S + new].

        Raises:
            ConfigError: prompts that cannot be continued together, padding without a mask, or an argument out of range.
        """
        next_logits, prompts = prompted(self, input_ids, attention_mask)
        return generate(
            next_logits,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            eos_token_id=eos_token_id,
            seed=seed,
        )

    # --- weights

    def synchronize(self) -> None:
        """Wait for every step issued; until the next `step()` the script's parameters and buffers are the newest.

        They are live views in the model's dtype: clone to keep. Gradients that no step has taken stay.
        """
        self._model.synchronize()

    # --- watching (docs/observing.md)

    def log_to(self, sink: str | os.PathLike[str] | Sink) -> None:
        """From now on log every finished step: loss, grad_norm, lr, items_per_s, tokens_per_s, bubble, memory...

        Args:
            sink: a folder, which gets `metrics.jsonl` and, where tensorboard is installed, its events; or any object
                with `log(dict, step=)`. It is called in a thread of its own, and `close` waits until it has all.

        Raises:
            ConfigError: it is neither, or nothing can be written there.
        """
        self._model.start_of_call()
        self._model.figures.log_to(sink)

    def trace(self, file: str | os.PathLike[str] = "trace.json", *, steps: int | None = None) -> Trace:
        """Record what every device, copy and process does, as a file that Perfetto opens and `rpctl trace` draws.

        Args:
            file: is written when the trace ends.
            steps: so many whole iterations, from the next one that begins. None: all that runs until `stop()`, the end
                of a `with` block or the session's end.

        Raises:
            ConfigError: the file cannot be written there.
        """
        self._model.start_of_call()
        return self._model.figures.trace(file, steps)

    # --- checkpoints (rpruntime/checkpoints/checkpoints.py)

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
        return self._model.save_checkpoint(folder, extra=extra, keep=keep, wait=wait)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> CheckpointInfo:
        """Go on from a checkpoint: the newest complete one in `folder`, or `folder` itself.

        Waits for running work and discards gradients that no step has taken. The continued run is the uninterrupted
        one, bit for bit. Load only files that you trust: they hold pickled objects.

        Raises:
            CheckpointError: there is none, it is damaged, or of another model or version; nothing has changed.
        """
        return self._model.load_checkpoint(folder)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Replace weights and buffers by name, as `model.load_state_dict` would; the optimizer's state stays.

        Waits for running work and discards gradients that no step has taken. Returns what torch's returns:
        `missing_keys` and `unexpected_keys`.

        Raises:
            RuntimeError: as torch's, for a name or shape that does not fit; nothing has changed.
        """
        return self._model.load_state_dict(state, strict)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` (scheduler, loader) that checkpoints take along, in order."""
        self._model.checkpoints.script.register(objects)

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
        if not self._model.closed:
            self._model.script.check()
            self.synchronize()
        with saying(f"writing {os.fspath(folder)}", quiet=self._model._quiet):
            saving.save(self.model, folder, dtype=dtype, merge_adapters=merge_adapters)

    def close(self) -> None:
        """End the pipe, not the session; the newest weights stay in the script's private memory.

        Whatever it raises, the pipe is closed and the session has forgotten the model.
        """
        self._model.close()

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, *error: Any) -> None:
        self._model.__exit__(*error)


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


def _least_memory(session: Any) -> int:
    """Bytes of the device that has least; 0 where there is none to speak of."""
    known = [int(info["memory_bytes"]) for info in session.ready.values() if "memory_bytes" in info]
    return min(known, default=0)
