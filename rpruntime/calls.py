"""Calls of a model: batches cut, copied into the controller's arena and given to its machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from rpruntime.control import events as ev
from rpruntime.encoder import Encoder
from rpruntime.losses import BUILT_IN
from rpruntime.microbatch import CutCall, cut_call
from rpruntime.models.batches import BatchCheck
from rpruntime.models.parts import follow_modes, is_causal_lm
from rpruntime.results import Loss
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.worker.context import capture

if TYPE_CHECKING:
    from rpruntime.model import Model


class Calls:
    """Of one model; the modes (train, eval) that its layers have now are those that its processes know."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._modes = self._modes_now()
        self._check_batch: BatchCheck | None = None
        if is_causal_lm(model.module):
            labels = model.prepared.loss_fn in BUILT_IN
            self._check_batch = BatchCheck(model.module, labels=labels, say_once=model.say_once)

    def cut(
        self,
        inputs: Any,
        labels: Any,
        num_microbatches: int,
        *,
        num_items: float | None = None,
        may_be_zero: bool = False,
        has_loss: bool = True,
    ) -> CutCall:
        """Cut a batch into micro-batches, weighed by rows where there is no loss.

        Raises:
            ConfigError: it cannot be cut; nothing has happened.
        """
        prepared = self._model.prepared
        cut = cut_call(
            inputs,
            labels,
            num_microbatches=num_microbatches,
            chunk_dims=prepared.chunk_dims,
            loss_weight=prepared.loss_weight if has_loss else None,
            num_items=num_items,
            may_be_zero=may_be_zero,
        )
        if self._check_batch is not None:
            for args, kwargs, label in zip(cut.args, cut.kwargs, cut.labels, strict=True):
                self._check_batch(args, kwargs, label)
        if cut.warning:
            self._model.say_once(cut.warning)
        return cut

    def train(self, cut: CutCall, plan: ExecutionPlan | None, *, has_labels: bool, scale: float) -> tuple[Loss, int]:
        """Issue a training call under a plan, or one whose tasks are to come; its loss and its number."""
        loss = Loss(self._model.client, "the loss of a call")
        stages = "tasks"
        if plan is not None:
            stages = f"{len(plan.forward)} forward, {len(plan.backward)} backward stages"

        numbers: list[int] = []

        def book(call: int) -> None:
            numbers.append(call)
            self._model.books.open.append((call, loss, scale))
            self._model.figures.note_call(call, cut, stages)
            self._model.synchronized = False

        self._issue(cut, loss, book, plan=plan, has_labels=has_labels, scale=scale)
        return loss, numbers[0]

    def start_inference(
        self, cut: CutCall, plan: ExecutionPlan, *, has_labels: bool, wants_output: bool
    ) -> tuple[Loss, int]:
        """Issue a forward pass in eval mode: its result and its number, for `end_inference`."""
        result = Loss(self._model.client, "an evaluation call")
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
        return self._model.books.finished.pop(number)

    def infer(self, cut: CutCall, plan: ExecutionPlan) -> list[Any]:
        """What the model returns for each micro-batch, with the weights after every step issued."""
        finished = self.end_inference(*self.start_inference(cut, plan, has_labels=False, wants_output=True))
        try:
            return [self._model.decode(payload) for payload in finished.outputs]
        finally:
            self._model.client.do(ev.OutputTakenEvent(finished.call))

    def _issue(self, cut: CutCall, loss: Loss, book: Callable[[int], None], **settings: Any) -> None:
        """Copy a call's values into the arena and hand the call to the machine; `book` notes its number."""
        encoder = Encoder(self._model.client, self._model.say_once)
        issued = False

        def issue() -> ev.CallEvent:
            nonlocal issued
            issued = True
            call = self._model.client.new_call(self._model.number)
            self._model.books.losses[call] = loss
            book(call)
            return dataclasses.replace(event, call=call)

        try:
            event = self._call_event(cut, encoder, **settings)
            self._model.act(issue)
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
        self._model.script.check()
        context = capture()
        modes = enumerate(self._modes_now())
        context["modes"] = tuple((p, flags) for p, flags in modes if flags != self._modes[p])
        inputs = [encoder.encode((args, kwargs), "inputs") for args, kwargs in zip(cut.args, cut.kwargs, strict=True)]
        labels = [encoder.encode(label, "labels") if has_labels else None for label in cut.labels]
        return ev.CallEvent(
            call=0,
            model=self._model.number,
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
        follow_modes(self._model.layout.layers)
        return [_modes(layer) for layer in self._model.layout.layers]


def _modes(layer: nn.Module) -> bytes:
    return bytes(module.training for module in layer.modules())
