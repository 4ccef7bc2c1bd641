"""Carrying out one slot: its micro-batches' forwards and backwards, its gradient sums, what it publishes.

forward    act(start) -> layers -> act at every position that somebody reads, buffers
fused      act(start) -> layers -> loss -> backward -> agrad(start), sums
backward   act(start), agrad(stop) -> layers again -> backward -> agrad(start), sums
infer      act(start) -> layers in eval mode -> act, or loss and outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rpruntime.errors import ConfigError
from rpruntime.seeds import layer_seed
from rpruntime.store.arena import Arena, contiguous_stride, dtype_name, view
from rpruntime.store.handle import MAX_INLINE_SKELETON_BYTES, Extent, Payload, TensorHandle
from rpruntime.store.layout import gradient_layout
from rpruntime.store.values import SINGLE_TENSOR, put_together, take_apart, why_not_picklable
from rpruntime.wire.messages import CallMsg, Key, SlabPart, SlotTask
from rpruntime.worker.context import applied
from rpruntime.worker.machine import LossEvent, PublishedEvent, RunMicrobatch, SlabEvent
from rpruntime.worker.modules import WorkerModel
from rpruntime.worker.transfers import Copy, Transfers

MAX_METRICS = 1000


class _Entrance(torch.autograd.Function):
    """Identity whose output is no leaf, so that a layer may change its input in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass
class Publication:
    """An event that waits for its copies."""

    event: Any
    copies: list[Copy]

    def done(self) -> bool:
        return all(copy.done() for copy in self.copies)


@dataclass
class Place:
    """Where the user's code is running, for error messages."""

    phase: str = ""
    layer: int = -1
    microbatch: int = -1


@dataclass
class _Entered:
    """The input of a segment on the device."""

    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The tensors in `value`."""
    leaves: list[torch.Tensor | None] = field(default_factory=list)
    """The leaf behind each tensor that wants a gradient."""
    handles: dict[int, tuple[TensorHandle, bool, int]] = field(default_factory=dict)
    """id(tensor) -> (its handle, wants a gradient, version), for tensors that may be passed on unchanged."""


class Stage:
    """One slot under way."""

    def __init__(self, task: SlotTask, model: WorkerModel, transfers: Transfers, arena: Arena) -> None:
        self.task = task
        self.place = Place()
        self.publications: list[Publication] = []
        self.own: list[Extent] = []
        self._marks: list[tuple[str, int, int, int, Any, Any]] = []
        self.weights: dict[int, Copy] = {}
        """Its units' slabs on their way to the device."""
        self.failure: Exception | None = None
        """Why its weights could not be staged."""
        self.end: Any = None
        """The mark after its last work, once that is launched."""
        self._model = model
        self._transfers = transfers
        self._arena = arena
        self._store = arena.store
        self._sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self._bound = False
        self._call: CallMsg | None = None
        self._inputs: dict[Key, Payload] = {}
        self._m = -1
        self._backward_began: Any = None

    @property
    def layers(self) -> range:
        return range(*self.task.layers)

    def run(self, work: RunMicrobatch) -> None:
        """Launch one micro-batch. Raises what the user's code raises; `place` says where."""
        self._call, self._inputs, self._m = work.call, work.inputs, work.microbatch
        self.place = Place("start", -1, work.microbatch)
        if not self._bound:
            self._bind(work.call)
        with applied(work.call.context):
            {"forward": self._forward, "infer": self._infer, "fused": self._fused, "backward": self._backward}[
                self.task.kind
            ]()
        self._inputs = {}

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
        modes = dict(call.context.get("modes", ()))
        slabs = {unit: copy.wait() for unit, copy in self.weights.items()}
        for position in self.layers:
            layer = self._model.layers[position]
            layer.start_slot()
            layer.bind_parameters(slabs, with_gradients=self.task.kind in ("fused", "backward"))
            layer.set_modes(call.training, modes.get(position))
        self._bound = True

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
            self._publish_value(("out", self.task.call, self._m), value, entered, "output")
        else:
            loss, metrics = self._loss(value)
            self._publish_loss(loss, metrics)

    def _fused(self) -> None:
        if self._now.weights[self._m] == 0:
            entered = self._enter(self._key("act", self.task.layers[0]), with_gradients=False)
            self._run_layers(entered, self.layers, "forward", commit=True, publish=False)
            self._publish_loss(torch.zeros((), device=self._transfers.device), {})
            return
        start, stop = self.task.layers
        if self._model.msg.recompute == "layer" and stop - start > 1:
            self._fused_by_layer()
            return
        entered = self._enter(self._key("act", start), with_gradients=True)
        value = self._run_layers(entered, self.layers, "forward", commit=True, publish=False)
        self._backward_from_loss(value)
        self._finish_backward(entered, self.layers, last=True)

    def _fused_by_layer(self) -> None:
        """Grain "layer": forward keeps each layer's input on the device, backward recomputes layer by layer."""
        start, stop = self.task.layers
        kept: list[tuple[bytes, list[torch.Tensor], list[bool]]] = []
        first = self._enter(self._key("act", start), with_gradients=False)
        value = first.value
        for position in range(start, stop - 1):
            kept.append(self._keep(value, position, first))
            value = self._run_layers(
                _Entered(value), range(position, position + 1), "forward", commit=True, publish=False
            )
        skeleton, tensors, flags = self._keep(value, stop - 1, first)
        entered = self._enter_tensors(skeleton, tensors, flags)
        value = self._run_layers(entered, range(stop - 1, stop), "forward", commit=True, publish=False)
        self._backward_from_loss(value)
        grads = self._finish_backward(entered, range(stop - 1, stop), last=False)
        for position in reversed(range(start, stop - 1)):
            entered = self._enter_tensors(*kept.pop())
            value = self._run_layers(entered, range(position, position + 1), "recompute", commit=False, publish=False)
            self._backward_from(value, grads)
            grads = self._finish_backward(entered, range(position, position + 1), last=position == start)

    def _backward(self) -> None:
        start, stop = self.task.layers
        payload = self._inputs["agrad", self.task.call, self._m, stop]
        flags = self._store.skeleton(payload)
        grads: list[torch.Tensor | None] = [None] * len(flags)
        uploads = iter([self._upload(handle) for handle in payload.tensors])
        for index, present in enumerate(flags):
            if present:
                grads[index] = next(uploads).wait()
        segments = [self.layers]
        if self._model.msg.recompute == "layer":
            segments = [range(position, position + 1) for position in reversed(self.layers)]
        for segment in segments:
            entered = self._enter(self._key("act", segment.start), with_gradients=True)
            value = self._run_layers(entered, segment, "recompute", commit=False, publish=False)
            self._backward_from(value, grads)
            grads = self._finish_backward(entered, segment, last=segment.start == start)

    # --- entering a segment

    def _enter(self, key: Key, *, with_gradients: bool) -> _Entered:
        payload = self._inputs[key]
        copies = [self._upload(handle) for handle in payload.tensors]
        skeleton = self._store.skeleton(payload)
        flags = payload.needs_grad if with_gradients else (False,) * len(copies)
        entered = self._enter_tensors(skeleton, [copy.wait() for copy in copies], flags)
        for tensor, handle, flag in zip(entered.tensors, payload.tensors, payload.needs_grad, strict=True):
            entered.handles[id(tensor)] = (handle, flag, tensor._version)
        return entered

    def _enter_tensors(self, skeleton: bytes, tensors: Sequence[torch.Tensor], flags: Sequence[bool]) -> _Entered:
        leaves = [
            tensor.detach().requires_grad_() if flag else None for tensor, flag in zip(tensors, flags, strict=True)
        ]
        entrances = [
            tensor if leaf is None else _Entrance.apply(leaf) for tensor, leaf in zip(tensors, leaves, strict=True)
        ]
        return _Entered(put_together(skeleton, entrances), entrances, leaves)

    def _keep(self, value: Any, position: int, first: _Entered) -> tuple[bytes, list[torch.Tensor], list[bool]]:
        """A copy of a layer's input that nothing can change, with the flags of those that want a gradient."""
        skeleton, tensors = self._take_apart(value, position)
        flags = []
        for tensor in tensors:
            known = first.handles.get(id(tensor))
            if known is not None and known[2] == tensor._version:
                flags.append(known[1])
            else:
                flags.append(self._wants_gradient(tensor, position))
        return skeleton, [tensor.detach().clone() for tensor in tensors], flags

    def _wants_gradient(self, tensor: torch.Tensor, position: int) -> bool:
        return position > self._model.first_trainable and (tensor.is_floating_point() or tensor.is_complex())

    # --- running layers

    def _run_layers(self, entered: _Entered, layers: range, phase: str, *, commit: bool, publish: bool) -> Any:
        """Run consecutive layers; `commit`: this is the one forward that updates buffers."""
        value, call = entered.value, self._now
        wanted = dict(self.task.publish) if publish else {}
        since = self._transfers.mark()
        for position in layers:
            self.place = Place(phase, position, self._m)
            layer = self._model.layers[position]
            if layer.spec.buffers:
                layer.bind_buffers(self._inputs[self._buffers_before(position)], lambda h: self._upload(h).wait())
            torch.manual_seed(
                layer_seed(self._model.msg.seed, call.iteration, call.first_microbatch + self._m, position)
            )
            value = layer.module(*value[0], **value[1]) if position == 0 else layer.module(value)
            since = self._mark(phase, position, position + 1, since)
            if layer.spec.buffers and commit:
                self._publish_buffers(position)
            if position + 1 in wanted:
                last = position + 1 == layers.stop
                self._publish_value(self._key("act", position + 1), value, entered, "forward", snapshot=not last)
        return value

    def _buffers_before(self, position: int) -> Key:
        call = self._now
        before = call.buffers_from if self._m == 0 or self.task.kind == "infer" else (self.task.call, self._m - 1)
        return ("buffer", *before, position)

    # --- backward

    def _loss(self, value: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        self.place = Place("loss", -1, self._m)
        result = value
        if self._model.loss_fn is not None:
            label = self._inputs.get(("label", self.task.call, self._m))
            if label is None:
                result = self._model.loss_fn(value)
            else:
                result = self._model.loss_fn(value, self._labels(label))
        metrics: dict[str, Any] = {}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result, metrics = result
            if len(metrics) > MAX_METRICS:
                raise ConfigError(f"loss_fn returned {len(metrics)} metrics; {MAX_METRICS} at most are reported")
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            what = "the last layer's output (loss_fn is None)" if self._model.loss_fn is None else "loss_fn's result"
            shape = (
                f"a tensor of shape {tuple(result.shape)}"
                if isinstance(result, torch.Tensor)
                else f"a {type(result).__name__}"
            )
            raise ConfigError(
                f"the loss must be a tensor with one element, but {what} is {shape}; take its mean, for example"
            )
        return result, metrics

    def _labels(self, payload: Payload) -> Any:
        skeleton = self._store.skeleton(payload)
        return put_together(skeleton, [self._upload(handle).wait() for handle in payload.tensors])

    def _backward_from_loss(self, value: Any) -> None:
        since = self._transfers.mark()
        loss, metrics = self._loss(value)
        self._publish_loss(loss.detach(), metrics)
        numerator, denominator = self._now.coefficients[self._m]
        scaled = loss / denominator if numerator == 1 else loss * numerator / denominator
        if self._now.scale != 1:
            scaled = scaled * self._now.scale
        self._backward_began = self._mark("loss", len(self._model.layers), len(self._model.layers), since)
        if scaled.requires_grad:
            self.place = Place("backward", self._only_layer, self._m)
            scaled.backward()

    def _backward_from(self, value: Any, grads: list[torch.Tensor | None]) -> None:
        _, tensors = self._take_apart(value, self.place.layer + 1)
        if len(tensors) != len(grads):
            raise ConfigError(
                f"recompute gave {len(tensors)} tensors where forward gave {len(grads)}: the layer's output depends on "
                "something other than its input, its buffers and the seed"
            )
        pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if g is not None and t.requires_grad]
        self._backward_began = self._transfers.mark()
        if pairs:
            self.place = Place("backward", self._only_layer, self._m)
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    @property
    def _only_layer(self) -> int:
        return self.layers.start if len(self.layers) == 1 else -1

    def _finish_backward(self, entered: _Entered, layers: range, *, last: bool) -> list[torch.Tensor | None]:
        """Add up the parameters' gradients; return those of the segment's input, published where it is the slot's."""
        for position in layers:
            for (unit, index), parameter in self._model.layers[position].parameters.items():
                if parameter.grad is not None:
                    self._add(position, unit, index, parameter.grad)
                    parameter.grad = None
        self._mark("backward", layers.start, layers.stop, self._backward_began)
        grads = [None if leaf is None else leaf.grad for leaf in entered.leaves]
        if last and self.task.grad_to:
            present = [grad for grad in grads if grad is not None]
            skeleton = bytes(grad is not None for grad in grads)
            self._publish(self._key("agrad", self.task.layers[0]), skeleton, present, (False,) * len(present))
        return grads

    def _add(self, position: int, unit: int, index: int, grad: torch.Tensor) -> None:
        """fp32 sums, micro-batches in order from zero (docs/numerics.md)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        total = self._sums.get((position, unit, index))
        if total is None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._sums[position, unit, index] = grad.to(wide)
        else:
            total.add_(grad)

    def finish(self) -> None:
        """Launch the rest: sums go to the host, deepest position first; the device lets go of the weights."""
        if self.task.kind in ("fused", "backward"):
            self._hand_over_sums()
        self.end = self._transfers.mark()
        self.release()

    def release(self) -> None:
        """Let go of the weights; what is being copied stays alive with its copies."""
        if self._bound:
            for position in self.layers:
                self._model.layers[position].release_parameters()
        self._bound = False
        self.weights = {}

    def weights_arrived(self) -> bool:
        """Whether no weight is on its way to the device any more."""
        return all(copy.done() for copy in self.weights.values())

    def _hand_over_sums(self) -> None:
        """Each unit's sums in one slab, rounded once to the gradient dtype."""
        for position in reversed(self.layers):
            parts, copies = [], []
            for unit in self._model.trainable_units(position):
                sums = [self._sums.pop((position, unit.index, index), None) for index in range(len(unit.params))]
                if all(total is None for total in sums):
                    continue
                offsets, nbytes = gradient_layout(unit)
                extent = self._allocate(nbytes)
                slab = torch.empty(nbytes, dtype=torch.uint8, device=self._transfers.device)
                for total, param, offset in zip(sums, unit.params, offsets, strict=True):
                    if total is not None:
                        view(slab, offset, param.shape, param.grad_dtype).copy_(total)
                copies.append(self._transfers.download(slab, self._store.bytes_of(extent), "grad"))
                parts.append(SlabPart(unit.index, extent, tuple(total is not None for total in sums)))
            self.publications.append(Publication(SlabEvent(self.task.slot, position, tuple(parts)), copies))

    # --- publishing

    def _publish_value(self, key: Key, value: Any, entered: _Entered, phase: str, *, snapshot: bool = False) -> None:
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
        if snapshot:  # the next layer may change the value in place while it is being copied
            tensors = [t if index in reused else t.detach().clone() for index, t in enumerate(tensors)]
        self._publish(key, skeleton, tensors, tuple(flags), reused)

    def _publish_buffers(self, position: int) -> None:
        key = self._key("buffer", position)
        payload = self._inputs[self._buffers_before(position)]
        handles = put_together(self._store.skeleton(payload), payload.tensors)
        now, changed = self._model.layers[position].buffers_now()
        if not changed and set(now) == set(handles):
            self.publications.append(Publication(PublishedEvent(self.task.slot, key, payload, ()), []))
            return
        self._model.layers[position].check_changes(changed, cast=self._model.msg.cast)
        values = {name: t if t is None or name not in changed else t.detach().clone() for name, t in now.items()}
        skeleton, tensors = take_apart(values)
        names = {id(tensor): name for name, tensor in values.items()}
        reused = {i: handles[names[id(t)]] for i, t in enumerate(tensors) if names[id(t)] not in changed}
        self._publish(key, skeleton, tensors, (False,) * len(tensors), reused)

    def _publish(
        self,
        key: Key,
        skeleton: bytes,
        tensors: Sequence[torch.Tensor],
        flags: tuple[bool, ...],
        reused: dict[int, TensorHandle] | None = None,
    ) -> None:
        handles, copies, before = [], [], len(self.own)
        for index, tensor in enumerate(tensors):
            handle = (reused or {}).get(index)
            if handle is None:
                handle = self._room_for(tensor)
                copies.append(self._transfers.download(tensor.detach(), self._store.tensor(handle), "act"))
            handles.append(handle)
        body: bytes | TensorHandle = skeleton
        if len(skeleton) > MAX_INLINE_SKELETON_BYTES:
            body = TensorHandle(self._allocate(len(skeleton)), 0, (len(skeleton),), (1,), "uint8")
            self._store.tensor(body).copy_(torch.frombuffer(bytearray(skeleton), dtype=torch.uint8))
        payload = Payload(body, tuple(handles), flags)
        event = PublishedEvent(self.task.slot, key, payload, tuple(self.own[before:]))
        self.publications.append(Publication(event, copies))

    def _publish_loss(self, loss: torch.Tensor, metrics: dict[str, Any]) -> None:
        names = tuple(metrics)
        values = [
            loss.detach().reshape(()).float(),
            *(torch.as_tensor(metrics[n]).detach().reshape(()).float() for n in names),
        ]
        device = self._transfers.device
        row = torch.stack([value.to(device) for value in values])
        extent = self._allocate(row.nbytes)
        host = view(self._store.bytes_of(extent), 0, row.shape, "float32")
        self.publications.append(
            Publication(
                _PendingLoss(self.task.slot, self._m, host, names, extent), [self._transfers.download(row, host, "act")]
            )
        )

    def take_published(self) -> list[Any]:
        """Events whose copies have come to the host, in order of publication within each kind of copy."""
        ready: list[Publication] = []
        waiting: list[Publication] = []
        for publication in self.publications:
            (ready if publication.done() else waiting).append(publication)
        self.publications = waiting
        return [self._resolve(publication.event) for publication in ready]

    def _resolve(self, event: Any) -> Any:
        if not isinstance(event, _PendingLoss):
            return event
        loss, *metrics = event.host.tolist()
        self.own.remove(event.extent)
        self._arena.free(event.extent)  # never left this process
        return LossEvent(event.slot, event.microbatch, loss, dict(zip(event.names, metrics, strict=True)))

    # --- small things

    @property
    def _now(self) -> CallMsg:
        assert self._call is not None
        return self._call

    def _key(self, kind: str, position: int) -> Key:
        return (kind, self.task.call, self._m, position)

    def _upload(self, handle: TensorHandle) -> Copy:
        return self._transfers.upload(self._store.tensor(handle), "act")

    def _allocate(self, nbytes: int) -> Extent:
        extent = self._arena.allocate(nbytes)
        self.own.append(extent)
        return extent

    def _room_for(self, tensor: torch.Tensor) -> TensorHandle:
        shape = tuple(tensor.shape)
        dense = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()
        extent = self._allocate(tensor.numel() * tensor.element_size())
        stride = dense if tensor.numel() else contiguous_stride(shape)
        return TensorHandle(extent, 0, shape, tuple(stride), dtype_name(tensor.dtype))

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


@dataclass
class _PendingLoss:
    slot: int
    microbatch: int
    host: torch.Tensor
    names: tuple[str, ...]
    extent: Extent
