"""A model's layers, run on the meta device: work, what passes between them, device memory. Nothing is computed.

Each layer goes forward and backward as a stage of its own does, with one micro-batch. Work is counted by
`torch.utils.flop_counter`, memory by watching storages come and go. Attention counts as the fused kernels of GPUs,
which never hold all scores.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rpruntime.errors import ConfigError
from rpruntime.layout import ModelLayout, shown_class
from rpruntime.store.arena import dtype_of
from rpruntime.store.values import take_apart
from rpruntime.worker.segment import Entered, enter_tensors


@dataclass(frozen=True)
class LayerCost:
    """One layer and one micro-batch.

    Attributes:
        kind: equal for layers that do the same (class, shapes of parameters and of inputs).
        forward_flops: of the forward, with the loss in the last layer.
        backward_flops: of the backward, without the recomputation.
        input_bytes: what the layer before hands on (host memory); what it passes on unchanged is not counted again.
        gradient_bytes: of the gradient of the input.
        kept_bytes: device memory between forward and backward, input included.
        peak_bytes: the most during both, input and gradients included.
    """

    name: str
    class_name: str
    kind: tuple[Any, ...]
    forward_flops: int
    backward_flops: int
    input_bytes: int
    gradient_bytes: int
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Work:
    """A layer that is about to run; skeleton, tensors and flags are its input, as `enter_tensors` takes it."""

    kind: tuple[Any, ...]
    layer: nn.Module
    skeleton: bytes
    tensors: Sequence[torch.Tensor]
    flags: Sequence[bool]
    loss: Callable[[Any], torch.Tensor] | None
    """Of the last layer."""


def cast_to_layout(layout: ModelLayout) -> None:
    """Give the meta parameters the dtypes in which layers compute."""
    for (unit, index), parameter in layout.parameters.items():
        parameter.data = parameter.data.to(dtype_of(layout.units[unit].params[index].dtype))
        parameter.requires_grad_(layout.units[unit].trainable)


def costs_of(layout: ModelLayout, chunk: torch.Tensor, show: Callable[[Work], None] | None = None) -> list[LayerCost]:
    """Run all layers with one micro-batch; of layers that do the same, one.

    Args:
        layout: of a model on the meta device, after `cast_to_layout`.
        chunk: the micro-batch, on the meta device.
        show: is called for each layer that runs, before it does (`--measure` times it).

    Raises:
        ConfigError: a layer cannot run without values; names it.
    """
    first_trainable = min((min(u.positions) for u in layout.units if u.trainable), default=len(layout.layers))
    found: list[LayerCost] = []
    outcomes: dict[Any, _Outcome] = {}
    skeleton, tensors = take_apart(chunk)
    flags = [False] * len(tensors)
    passed: set[int] = set()
    for position, layer in enumerate(layout.layers):
        loss = loss_of(chunk) if position == len(layout.layers) - 1 else None
        kind = _kind_of(layer, tensors, loss is not None)
        key = (*kind, skeleton, tuple(flags))
        if key not in outcomes:
            work = Work(kind, layer, skeleton, tensors, flags, loss)
            if show is not None:
                show(work)
            try:
                outcomes[key] = _run(work)
            except ConfigError as err:
                raise ConfigError(f"layer {position} {layout.names[position]}: {err}") from err
            except (RuntimeError, NotImplementedError, TypeError) as err:
                raise ConfigError(
                    f"layer {position} {layout.names[position]} ({shown_class(layer)}) does not run on the meta "
                    f"device, so nothing can be said of it: {str(err).strip().splitlines()[0]}"
                ) from err
        done = outcomes[key]
        carried = sum(_dense_bytes(tensor) for tensor in tensors)
        found.append(
            LayerCost(
                layout.names[position],
                shown_class(layer),
                kind,
                done.forward_flops,
                done.backward_flops,
                sum(_dense_bytes(tensor) for tensor in tensors if id(tensor) not in passed),
                done.gradient_bytes,
                done.kept_bytes + carried,
                done.peak_bytes + carried,
            )
        )
        # a tensor that a layer hands on as it got it keeps its place in host memory
        outputs = [tensors[source] if isinstance(source, int) else torch.empty_like(source) for source in done.outputs]
        passed = {id(tensor) for tensor in tensors}
        skeleton, tensors = done.skeleton, outputs
        flags = [wants and position + 1 > first_trainable for wants in done.wants_gradient]
    return found


@dataclass(frozen=True)
class _Outcome:
    """What a layer did. `outputs`: new tensors, or places of inputs that it hands on as they are."""

    forward_flops: int
    backward_flops: int
    gradient_bytes: int
    kept_bytes: int
    peak_bytes: int
    skeleton: bytes
    outputs: tuple[torch.Tensor | int, ...]
    wants_gradient: tuple[bool, ...]


def _run(work: Work) -> _Outcome:
    memory, counter = MetaMemory(work.tensors), FlopCounterMode(display=False)
    with _quiet(), counter, memory, FusedAttention():
        entered = enter_tensors(work.skeleton, work.tensors, work.flags)
        value = work.layer(entered.value)
        if work.loss is not None:
            value = work.loss(value)
        forward, kept = counter.get_total_flops(), memory.live
        after, outputs = take_apart(value)
        gradients = _backward(entered, outputs, work.layer)
    places = {id(tensor): index for index, tensor in enumerate(entered.tensors)}
    return _Outcome(
        forward,
        counter.get_total_flops() - forward,
        gradients,
        kept,
        memory.peak,
        after,
        tuple(places.get(id(tensor), tensor.detach()) for tensor in outputs),
        tuple(tensor.is_floating_point() and tensor.requires_grad for tensor in outputs),
    )


def loss_of(chunk: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """A loss for what the last layer gives: as it is where it is a loss, cross-entropy for tokens, else mean square."""

    def loss(value: Any) -> torch.Tensor:
        output = value if isinstance(value, torch.Tensor) else take_apart(value)[1][0]
        if output.dim() == 0:
            return output
        if not chunk.is_floating_point() and output.dim() >= 2:
            labels = torch.zeros(output.shape[:-1].numel(), dtype=torch.int64, device=output.device)
            return F.cross_entropy(output.flatten(0, -2).float(), labels)
        return output.float().square().mean()

    return loss


def _backward(entered: Entered, outputs: Sequence[torch.Tensor], layer: nn.Module) -> int:
    """Go backward from all outputs that have a graph; returns the bytes of the input's gradients."""
    roots = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    gradients = sum(_dense_bytes(leaf.grad) for leaf in entered.leaves if leaf is not None and leaf.grad is not None)
    for parameter in layer.parameters():
        parameter.grad = None
    return gradients


def _dense_bytes(tensor: torch.Tensor) -> int:
    """As it lies in host memory: without strides of 0."""
    return tensor.numel() * tensor.element_size()


def _kind_of(layer: nn.Module, tensors: Sequence[torch.Tensor], last: bool) -> tuple[Any, ...]:
    shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters())
    inputs = tuple((tuple(t.shape), t.dtype) for t in tensors)
    return shown_class(layer), shapes, inputs, last


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's model, about what is not run for good here
        yield


class MetaMemory(TorchDispatchMode):
    """Bytes of the storages that operations make, while they live; those that were there before do not count."""

    def __init__(self, before: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value_of(args[0])
        for tensor in _tensors((args, kwargs)):
            self._known.setdefault(tensor.untyped_storage()._cdata, 0)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)

    def _value_of(self, tensor: torch.Tensor) -> Any:
        """A model that asks for a value on the way: yes where it is a question (masks: is nothing masked?)."""
        if tensor.dtype is torch.bool:
            return True
        raise ConfigError("it asks for the value of a tensor (item(), int(), if), and there are only shapes here")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_meta]


class FusedAttention(TorchFunctionMode):
    """Lets `scaled_dot_product_attention` run as the flash kernel, whatever the meta device would choose."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]
    return found
