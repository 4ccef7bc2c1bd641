"""Carrying out one slot: its micro-batches' forwards and backwards, its gradient sums, what it publishes.

forward    act(start) -> layers -> act at every position that somebody reads, buffers
fused      act(start) -> layers -> loss -> backward -> agrad(start), sums
backward   act(start), agrad(stop) -> layers again -> backward -> agrad(start), sums
infer      act(start) -> layers in eval mode -> act, or loss and outputs

A stage that goes backward runs as one segment, with one graph; or by layer, so that one layer's graph is alive at a
time: forward keeps the layers' inputs, then the layers run again one by one, deepest first. The numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rpruntime.errors import ConfigError
from rpruntime.seeds import layer_seed
from rpruntime.status import NullStatus, StatusWriter
from rpruntime.store.arena import GRADIENTS, POISON, Arena, poisons
from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.store.values import SINGLE_TENSOR, put_together, take_apart, why_not_picklable
from rpruntime.wire.messages import CallMsg, Key, SlabPart, SlotTask
from rpruntime.worker.context import applied, seed_generators
from rpruntime.worker.events import PublishedEvent, RunMicrobatch, SlabEvent
from rpruntime.worker.loss import loss_of, why_no_gradient
from rpruntime.worker.memory import explain, read_memory
from rpruntime.worker.modules import WorkerModel
from rpruntime.worker.outbox import Outbox, Publication
from rpruntime.worker.segment import Entered, Segment, enter_tensors, tensors_within
from rpruntime.worker.sums import Sums
from rpruntime.worker.transfers import Copy, Pieces, Transfers

_NO_BUFFERS = Payload(take_apart({})[0], (), ())


@dataclass
class Place:
    """Where the user's code is running, for error messages."""

    phase: str = ""
    layer: int = -1
    microbatch: int = -1


class Stage:
    """One slot under way.

    Args:
        task: what to run.
        model: the modules.
        transfers: copies to and from the device.
        arena: what is published goes here.
        by_layer: let only one layer's graph be alive at a time, as recompute="layer" does: slower, for a stage that
            does not fit otherwise. Stages without a backward run as always.
        status: is told where the user's code is.
    """

    def __init__(
        self,
        task: SlotTask,
        model: WorkerModel,
        transfers: Transfers,
        arena: Arena,
        *,
        by_layer: bool = False,
        status: StatusWriter | None = None,
    ) -> None:
        self.task = task
        self.by_layer = by_layer
        self._status = NullStatus() if status is None else status
        self.place = Place()
        self._outbox = Outbox(task.slot, transfers, arena)
        self._marks: list[tuple[str, int, int, int, Any, Any]] = []
        self.weights: dict[int, Pieces] = {}
        """Its units' slabs on their way to the device."""
        self.gradients: list[Pieces] = []
        """Its sums on their way to the host, of which `finish` has started nothing."""
        self._ahead: dict[Key, list[Copy]] = {}
        """Inputs of the next micro-batch on their way to the device."""
        self.failure: Exception | None = None
        """Why its weights could not be staged."""
        self.end: Any = None
        """The mark after its last work, once that is launched."""
        self._model = model
        self._transfers = transfers
        self._store = arena.store
        self._sums = Sums()
        self._bound = False
        self._call: CallMsg | None = None
        self._inputs: dict[Key, Payload] = {}
        self._m = -1
        self._loss_scale = 1.0
        self._backward_began: Any = None

    @property
    def layers(self) -> range:
        return range(*self.task.layers)

    @property
    def publications(self) -> list[Publication]:
        """What has not been announced yet, since it is on its way to the host."""
        return self._outbox.waiting

    @property
    def own(self) -> list[Extent]:
        """What it has allocated."""
        return self._outbox.own

    def take_published(self) -> list[Any]:
        """Events of what has come to the host since the last call."""
        return self._outbox.take()

    def run(self, work: RunMicrobatch) -> None:
        """Launch one micro-batch. Raises what the user's code raises; `place` says where."""
        self._call, self._inputs, self._m = work.call, work.inputs, work.microbatch
        self._loss_scale = work.loss_scale
        self._at("start", -1)
        if not self._bound:
            self._bind(work.call)
        with applied(work.call.context):
            {"forward": self._forward, "infer": self._infer, "fused": self._fused, "backward": self._backward}[
                self.task.kind
            ]()
        for key in self._inputs:  # what was brought for nothing, labels without weight: the slot ends behind it too
            for copy in self._ahead.pop(key, ()):
                copy.wait()
        self._inputs = {}

    def prefetch(self, inputs: dict[Key, Payload]) -> None:
        """Start bringing inputs of a micro-batch to the device that will run next."""
        for key, payload in inputs.items():
            self._ahead[key] = [self._upload(handle) for handle in payload.tensors]

    def _arriving(self, key: Key, payload: Payload) -> list[Copy]:
        """A payload's tensors on their way to the device."""
        found = self._ahead.pop(key, None)
        return [self._upload(handle) for handle in payload.tensors] if found is None else found

    def _at(self, phase: str, layer: int) -> None:
        """The user's code is about to run here. If the slot has ended a process, the device is waited for before."""
        if self.task.attempt:
            self._transfers.check()
        self.place = Place(phase, layer, self._m)
        self._status.at(self.task.slot, phase, layer, self._m)

    def spans(self) -> tuple[tuple[str, int, int, int, float, float], ...]:
        """What the device computed and when; see `SlotCommittedMsg`."""
        when = self._transfers.when_ms
        return tuple((*place, when(start), when(end)) for *place, start, end in self._marks)  # type: ignore[misc]

    def _mark(self, phase: str, start: int, stop: int, since: Any) -> Any:
        """Note that the device computed this from `since` until now; returns the mark of now."""
        now = self._transfers.mark()
        self._marks.append((phase, start, stop, self._m, since, now))
        return now

    def _bind(self, call: CallMsg) -> None:
        self._bound = True  # in part at first: also what fails half-way has to be released
        modes = dict(call.context.get("modes", ()))
        slabs = {unit: copy.wait() for unit, copy in self.weights.items()}
        for position in self.layers:
            layer = self._model.layers[position]
            layer.start_slot()
            layer.bind_parameters(slabs, with_gradients=self.task.kind in ("fused", "backward"))
            layer.set_modes(call.training, modes.get(position))

    # --- the four kinds

    def _forward(self) -> None:
        entered = self._enter(self._key("act", self.task.layers[0]), with_gradients=False)
        self._run_layers(entered, self.layers, "forward", commit=True, publish=True)

    def _infer(self) -> None:
        call = self._now
        entered = self._enter(self._key("act", self.task.layers[0]), with_gradients=False)
        value = self._run_layers(entered, self.layers, "evaluation", commit=False, publish=True)
        if self.task.layers[1] < len(self._model.layers):
            return
        if call.wants_output:
            self._publish_value(("out", self.task.call, self._m), value, entered)
        elif call.weights[self._m] == 0:
            self._outbox.add_loss(self._m, torch.zeros((), device=self._transfers.device), {})
        else:
            loss, metrics = self._loss(value)
            self._outbox.add_loss(self._m, loss, metrics)

    def _fused(self) -> None:
        segments = self._segments("forward", commit=True)
        grads = self._end_of_forward(segments.pop())
        if self._now.weights[self._m] != 0:
            self._backward_through(segments, grads)

    def _end_of_forward(self, segment: Segment) -> list[torch.Tensor | None]:
        """Forward, loss and backward of the deepest segment; returns the gradients of its input."""
        entered = segment.enter()
        # no name for what the layers return: logits that the loss does not keep are gone when backward runs
        loss = self._loss_of(self._run_layers(entered, segment.layers, "forward", commit=True, publish=False))
        if loss is None:
            return []
        self._backward_began = self._transfers.mark()
        self._at("backward", segment.only_layer)
        loss.backward()
        return self._finish_backward(entered, segment.layers)

    def _backward(self) -> None:
        if self._model.msg.recompute == "layer":  # the inputs of the inner layers are in host memory
            segments = [
                Segment(range(p, p + 1), partial(self._enter, self._key("act", p), with_gradients=True))
                for p in self.layers
            ]
        else:
            segments = self._segments("recompute", commit=False)
        payload = self._inputs["agrad", self.task.call, self._m, self.task.layers[1]]
        uploads = iter(self._arriving(("agrad", self.task.call, self._m, self.task.layers[1]), payload))
        flags = self._store.skeleton(payload)
        self._backward_through(segments, [next(uploads).wait() if present else None for present in flags])

    def _backward_through(self, segments: list[Segment], grads: list[torch.Tensor | None]) -> None:
        """Run segments again and backward, deepest first; `grads` are those of the last one's outputs."""
        while segments:
            grads = self._backward_of(segments.pop(), grads)

    def _backward_of(self, segment: Segment, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        # a function of its own: when it returns, nothing of the segment is alive but the gradients of its input
        entered = segment.enter()
        value = self._run_layers(entered, segment.layers, "recompute", commit=False, publish=False, graph_only=True)
        self._backward_from(value, grads, segment)
        return self._finish_backward(entered, segment.layers)

    def _segments(self, phase: str, *, commit: bool) -> list[Segment]:
        """The slot's layers, cut into segments: one, or each layer.

        By layer, all layers but the last run here, each with a graph that goes when the next one starts, so that
        each segment knows its input. The first one's is uploaded again, inner ones' are kept on the device.
        """
        start, stop = self.task.layers
        enter = partial(self._enter, self._key("act", start), with_gradients=True)
        if stop - start == 1 or not (self.by_layer or self._model.msg.recompute == "layer"):
            return [Segment(self.layers, enter)]
        segments = [Segment(range(start, start + 1), enter)]
        value = enter().value
        for position in range(start + 1, stop):
            before = range(position - 1, position)
            value = self._run_layers(Entered(value), before, phase, commit=commit, publish=False)
            skeleton, tensors, flags = self._cut(value, position)
            # a layer may change its input in place; the last one takes it as it is, since it runs only once
            kept = tensors if position == stop - 1 else [tensor.clone() for tensor in tensors]
            segments.append(Segment(range(position, position + 1), partial(enter_tensors, skeleton, kept, flags)))
            value = enter_tensors(skeleton, tensors, flags).value
        return segments

    def _cut(self, value: Any, position: int) -> tuple[bytes, list[torch.Tensor], list[bool]]:
        """A layer's input without the graph that made it: skeleton, tensors, which of them want gradients."""
        skeleton, tensors = self._take_apart(value, position)
        return skeleton, [tensor.detach() for tensor in tensors], [tensor.requires_grad for tensor in tensors]

    # --- entering a segment

    def _enter(self, key: Key, *, with_gradients: bool) -> Entered:
        payload = self._inputs[key]
        copies = self._arriving(key, payload)
        skeleton = self._store.skeleton(payload)
        flags = payload.needs_grad if with_gradients else (False,) * len(copies)
        entered = enter_tensors(skeleton, [copy.wait() for copy in copies], flags)
        for tensor, handle, flag in zip(entered.tensors, payload.tensors, payload.needs_grad, strict=True):
            entered.handles[id(tensor)] = (handle, flag, tensor._version)
        return entered

    def _wants_gradient(self, tensor: torch.Tensor, position: int) -> bool:
        return position > self._model.first_trainable and (tensor.is_floating_point() or tensor.is_complex())

    # --- running layers

    def _run_layers(
        self, entered: Entered, layers: range, phase: str, *, commit: bool, publish: bool, graph_only: bool = False
    ) -> Any:
        """Run consecutive layers; `commit`: this is the one forward that updates buffers; `graph_only`: nobody reads
        what the last one returns."""
        value, call = entered.value, self._now
        wanted = dict(self.task.publish) if publish else {}
        watched = len(layers) > 1 and torch.is_grad_enabled()
        since = self._transfers.mark()
        for position in layers:
            self._at(phase, position)
            layer = self._model.layers[position]
            if layer.spec.buffers:
                layer.bind_buffers(self._inputs[self._buffers_before(position)], lambda h: self._upload(h).wait())
            seed = self._model.msg.seed if call.seed is None else call.seed
            number = layer_seed(seed, call.iteration, call.first_microbatch + self._m, position)
            seed_generators(number, self._transfers.device)
            got = {(id(tensor), tensor._version) for tensor in tensors_within(value)} if watched else set()
            args, kwargs = value if position == 0 else ((value,), {})
            run = layer.tail.run if graph_only and position == layers.stop - 1 else layer.module
            value = run(*args, **kwargs)
            if watched:
                self._watch_backward(value, position, got)
            since = self._mark(phase, position, position + 1, since)
            if layer.spec.buffers and commit:
                self._publish_buffers(position)
            if position + 1 in wanted:
                self._publish_value(self._key("act", position + 1), value, entered)
        return value

    def _watch_backward(self, value: Any, position: int, got: set[tuple[int, int]]) -> None:
        """When backward comes to what this layer made, it is in this layer: errors name it. `got`: (id, version) of the
        layer's input; a tensor that it returns as it is belongs to the one before, and a parameter to nobody."""
        microbatch = self._m

        def entering(_: torch.Tensor) -> None:
            self.place = Place("backward", position, microbatch)
            self._status.at(self.task.slot, "backward", position, microbatch)

        for tensor in tensors_within(value):
            if tensor.grad_fn is not None and (id(tensor), tensor._version) not in got:
                tensor.register_hook(entering)

    def _buffers_before(self, position: int) -> Key:
        call = self._now
        before = call.buffers_from if self._m == 0 or self.task.kind == "infer" else (self.task.call, self._m - 1)
        return ("buffer", *before, position)

    # --- backward

    def _loss(self, value: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        self._at("loss", -1)
        loss_fn = self._model.loss_fn
        label = self._inputs.get(("label", self.task.call, self._m))
        labels = () if label is None or loss_fn is None else (self._labels(label),)
        return loss_of(loss_fn, value, *labels)

    def _labels(self, payload: Payload) -> Any:
        skeleton = self._store.skeleton(payload)
        copies = self._arriving(("label", self.task.call, self._m), payload)
        return put_together(skeleton, [copy.wait() for copy in copies])

    def _loss_of(self, value: Any) -> torch.Tensor | None:
        """The micro-batch's loss, told to the controller, as backward wants it; None: its weight is 0."""
        if self._now.weights[self._m] == 0:
            self._outbox.add_loss(self._m, torch.zeros((), device=self._transfers.device), {})
            return None
        since = self._transfers.mark()
        loss, metrics = self._loss(value)
        if not loss.requires_grad:
            raise ConfigError(why_no_gradient(self._model.loss_fn, value, loss))
        self._outbox.add_loss(self._m, loss.detach(), metrics)
        numerator, denominator = self._now.coefficients[self._m]
        scaled = loss / denominator if numerator == 1 else loss * numerator / denominator
        if self._loss_scale != 1:  # a tensor, so that the product of an fp16 scalar is fp32, as in torch's GradScaler
            scaled = scaled * torch.tensor(self._loss_scale, dtype=torch.float32)
        self._mark("loss", len(self._model.layers), len(self._model.layers), since)
        return scaled

    def _backward_from(self, value: Any, grads: list[torch.Tensor | None], segment: Segment) -> None:
        _, tensors = self._take_apart(value, segment.layers.stop)
        if len(tensors) != len(grads):
            raise ConfigError(
                f"recompute gave {len(tensors)} tensors where forward gave {len(grads)}: the layer's output depends on "
                "something other than its input, its buffers and the seed"
            )
        pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if g is not None and t.requires_grad]
        self._backward_began = self._transfers.mark()
        if pairs:
            self._at("backward", segment.only_layer)
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _finish_backward(self, entered: Entered, layers: range) -> list[torch.Tensor | None]:
        """Add up the parameters' gradients; return those of the segment's input, published where it is the slot's."""
        for position in layers:
            self._at("backward", position)
            for (unit, index), parameter in self._model.layers[position].parameters.items():
                if parameter.grad is not None:
                    self._sums.add(position, unit, index, parameter.grad)
                    parameter.grad = None
        self._mark("backward", layers.start, layers.stop, self._backward_began)
        grads = [None if leaf is None else leaf.grad for leaf in entered.leaves]
        if layers.start == self.task.layers[0] and self.task.grad_to:
            present = [grad for grad in grads if grad is not None]
            skeleton = bytes(grad is not None for grad in grads)
            self._outbox.add_value(self._key("agrad", self.task.layers[0]), skeleton, present, (False,) * len(present))
        return grads

    def finish(self) -> None:
        """Launch the rest: sums are ready to go to the host, deepest position first; the device lets go of the weights.

        The caller has started all of `weights`, and starts the copies of `gradients`, also if this raises.
        """
        if self.task.kind in ("fused", "backward"):
            self._hand_over_sums()
        for copy in self.weights.values():  # also of a slot without micro-batches: nothing is read after its end
            slab = copy.wait()
            if poisons():
                slab.fill_(POISON)
        self.end = self._transfers.mark()
        self.release()

    def release(self) -> None:
        """Let go of the weights; what is being copied stays alive with its copies."""
        self._unbind()
        self.weights = {}
        self._ahead = {}

    def drop(self) -> None:
        """Give the slot up, also in the middle of a micro-batch: nothing that it computed stays on the device.

        What comes up stays until it has arrived: `release` when `has_arrived`, `end` is reached and `take_published`
        has emptied `publications`.
        """
        self.end = self._transfers.mark()
        self._unbind()
        self._sums.clear()
        self._inputs = {}
        self.failure = None  # its frames

    def _unbind(self) -> None:
        """Take parameters, their gradients and buffers (a graph may hang on them) out of the modules."""
        if not self._bound:
            return
        self._bound = False
        for position in self.layers:
            layer = self._model.layers[position]
            layer.release_parameters()
            if layer.spec.buffers:
                layer.bind_buffers(_NO_BUFFERS, lambda handle: self._upload(handle).wait())
                layer.start_slot()

    def explain(self, err: BaseException, device_name: str) -> torch.OutOfMemoryError:
        """What the user is told of an error that is out of memory; call it while the frames of `err` are there."""
        place, call = self.place, self._call
        layer = ""
        if place.layer >= 0:
            spec = self._model.msg.layers[place.layer]
            name = "" if spec.name == str(place.layer) else f"{spec.name} "
            layer = f"layer {place.layer} {name}({spec.class_name})"
        return explain(
            err,
            phase=place.phase,
            layer=layer,
            stage=self.layers,
            device=device_name,
            memory=read_memory(self._transfers.device),
            by_layer=self.by_layer,
            recompute=self._model.msg.recompute,
            num_microbatches=0 if call is None else call.num_microbatches,
        )

    def has_arrived(self) -> bool:
        """Whether nothing is on its way to the device any more that no computation waits for."""
        ahead = (copy for copies in self._ahead.values() for copy in copies)
        return all(copy.done() for copy in (*self.weights.values(), *ahead))

    def _hand_over_sums(self) -> None:
        """Each unit's sums in one slab, times the call's scale, rounded once to the gradient dtype."""
        scale = 1.0 if self._call is None else self._call.scale  # None: no micro-batch ran, so there are no sums
        for position in reversed(self.layers):
            self._at("gradients", position)
            parts: list[SlabPart] = []
            copies: list[Pieces] = []
            for unit in self._model.trainable_units(position):
                found = self._sums.take(position, unit, scale, self._transfers.device)
                if found is None:
                    continue
                slab, present = found
                extent = self._outbox.allocate(slab.nbytes, GRADIENTS)
                copies.append(self._transfers.download_pieces(slab, self._store.bytes_of(extent)))
                parts.append(SlabPart(unit.index, extent, present))
            self._outbox.add(SlabEvent(self.task.slot, position, tuple(parts)), copies)
            self.gradients += copies

    # --- publishing

    def _publish_value(self, key: Key, value: Any, entered: Entered) -> None:
        position = key[3] if key[0] == "act" else len(self._model.layers)
        skeleton, tensors = self._take_apart(value, position)
        reused = {}
        flags = []
        for index, tensor in enumerate(tensors):
            known = entered.handles.get(id(tensor))
            if known is not None and known[2] == tensor._version:
                reused[index] = known[0]
                flags.append(known[1])
            else:
                flags.append(self._wants_gradient(tensor, position))
        self._outbox.add_value(key, skeleton, tensors, tuple(flags), reused)

    def _publish_buffers(self, position: int) -> None:
        key = self._key("buffer", position)
        payload = self._inputs[self._buffers_before(position)]
        handles = put_together(self._store.skeleton(payload), payload.tensors)
        now, changed = self._model.layers[position].buffers_now()
        if not changed and set(now) == set(handles):
            self._outbox.add(PublishedEvent(self.task.slot, key, payload, ()), [])
            return
        self._model.layers[position].check_changes(changed, cast=self._model.msg.cast)
        skeleton, tensors = take_apart(now)
        names = {id(tensor): name for name, tensor in now.items()}
        reused = {i: handles[names[id(t)]] for i, t in enumerate(tensors) if names[id(t)] not in changed}
        self._outbox.add_value(key, skeleton, tensors, (False,) * len(tensors), reused)

    # --- small things

    @property
    def _now(self) -> CallMsg:
        assert self._call is not None
        return self._call

    def _key(self, kind: str, position: int) -> Key:
        return (kind, self.task.call, self._m, position)

    def _upload(self, handle: TensorHandle) -> Copy:
        return self._transfers.upload(self._store.tensor(handle))

    def _take_apart(self, value: Any, position: int) -> tuple[bytes, list[torch.Tensor]]:
        if type(value) is torch.Tensor and value.layout is torch.strided:
            return SINGLE_TENSOR, [value]
        layer = self._model.msg.layers[position - 1]
        where = f"layer {position - 1} {layer.name} ({layer.class_name})"
        try:
            skeleton, tensors = take_apart(value)
        except Exception as err:
            raise ConfigError(
                f"{where} returned something that cannot cross processes: {why_not_picklable(value, 'output')}"
            ) from err
        for tensor in tensors:
            if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise ConfigError(
                    f"{where} returned a {type(tensor).__name__} of {tensor.layout}, which cannot cross processes"
                )
        return skeleton, tensors
