"""What a recomputation leaves out: the last product of a layer, where nobody reads its value.

Backward reads what a layer's operations have saved, not what the layer returned. In a transformer block the result of
the last Linear, a quarter of the block's forward, is only added to the residual, and an addition saves nothing. Where a
graph outlives its forward, a recomputation can stop before that product (as torch's checkpoints do); here the graph is
made anew, so the product's node is needed, but not its kernel.

    first recomputation    looks at the graph: which Linear is called last whose output comes to the layer's own through
                           additions and views, and is used by nothing else?
    later ones             that product is put off, and additions to it. Whatever else reads their results, or changes
                           anything in place, has them computed first. So has whoever still holds one when the layer
                           returns: a closure, or a Function that saved it without launching anything. The rest is
                           never computed.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpruntime.store.arena import poisons
from rpruntime.worker.segment import tensors_within
from rpruntime.worker.transfers import variant

RECOMPUTE_VARIABLE = "RPRUNTIME_RECOMPUTE"
"""For measurements: "needed" (the default), or "whole" (layers are recomputed to their ends)."""

MIN_FLOPS = 5e10
"""Smallest product, in floating-point operations, that is left out. The hooks cost about 0.1 ms of Python a layer, as
much as so many operations at 500 TFLOP/s."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_VIEWS = {
    _aten.t.default, _aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default, _aten.detach.default,
}  # fmt: skip
"""They launch nothing."""
_PASSING = {
    "AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0",
    "PermuteBackward0", "UnsqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
}  # fmt: skip
"""Nodes of the graph that save no tensor: of additions and views."""
_BESIDE = _PASSING | {
    "MmBackward0", "AddmmBackward0", "TBackward0", "MulBackward0", "NativeDropoutBackward0", "ToCopyBackward0",
}  # fmt: skip
"""Nodes that may be made after the product where they do not use it (an adapter's), and launch nothing unseen."""


_OF_LEAVES = 2**64 - 1
"""The sequence number of nodes that take gradients for leaves; others count up in their thread."""


class Tail:
    """Of one layer: finds its last product and leaves it out where only the graph is wanted."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._is_whole = variant(RECOMPUTE_VARIABLE, "needed", "whole") == "whole"
        """Whether nothing can be left out."""
        self._found: tuple[nn.Linear, int] | None = None
        """The Linear and how many times it has been called before; None: nobody has looked yet."""
        self.num_left_out = 0
        """Products and additions of the last run that were not computed."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns, but for the values of its tensors: they are right, or memory that nobody has written.
        Their graph is right."""
        self.num_left_out = 0
        if self._is_whole:
            return self._layer(*args, **kwargs)
        if self._found is None:
            return self._look(args, kwargs)
        with self._putting_off(*self._found) as put_off:
            value = self._layer(*args, **kwargs)
        put_off.settle(tensors_within(value))
        self.num_left_out = put_off.num_waiting
        self._is_whole = put_off.was_needed  # by something that did not read it when the graph was looked at
        return value

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls: list[tuple[nn.Linear, int, torch.Tensor]] = []
        counts: Counter[nn.Module] = Counter()

        def begin(module: nn.Module, _: Any) -> None:
            counts[module] += 1

        def end(module: nn.Linear, _: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and 2 * output.numel() * module.in_features >= MIN_FLOPS:
                calls.append((module, counts[module] - 1, output))

        handles = []
        for module in self._layer.modules():
            if type(module) is nn.Linear:
                handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        try:
            value = self._layer(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self._is_whole = True
        if calls and not calls[-1][2]._backward_hooks and _only_passes(calls[-1][2].grad_fn, value):
            self._found, self._is_whole = calls[-1][:2], False
        return value

    @contextlib.contextmanager
    def _putting_off(self, linear: nn.Linear, calls_before: int) -> Iterator[PutOff]:
        put_off, thread, count, is_over = PutOff(), threading.get_ident(), 0, False

        def begin(module: nn.Module, _: Any) -> None:
            nonlocal count
            if module is not linear or is_over:  # a copy, which has this hook too
                return
            # modes belong to threads, and end in the reverse order of their beginnings
            is_free = threading.get_ident() == thread and not torch._C._len_torch_dispatch_stack()
            if count == calls_before and is_free:
                put_off.__enter__()
                put_off.is_on = True
            count += 1

        handle = linear.register_forward_pre_hook(begin)
        try:
            yield put_off
        finally:
            is_over = True
            handle.remove()
            if put_off.is_on:
                put_off.__exit__(None, None, None)


def _only_passes(product: Any, value: Any) -> bool:
    """Whether the result of a node of the graph comes to a layer's outputs, and all nodes that use it, or what comes of
    it, only pass it on."""
    outputs = [tensor.grad_fn for tensor in tensors_within(value)]
    if product is None or product not in _reached(outputs, through=_PASSING):
        return False
    made = product._sequence_nr()
    later = {node for node in _reached(outputs) if made < node._sequence_nr() < _OF_LEAVES}
    using = {node for node in later if product in _reached([node])}
    return all(node.name() in (_PASSING if node in using else _BESIDE) for node in later)


def _reached(start: list[Any], through: set[str] | None = None) -> set[Any]:
    """Nodes of the graph behind these, and they; `through`: names of nodes behind which others are looked for."""
    found: set[Any] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if through is None or node.name() in through:
            waiting += [following for following, _ in node.next_functions]
    return found


@dataclass(frozen=True)
class _Later:
    """An operand that is put off itself: a view of the result of another operation."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Operation:
    """One that is put off, and where its result is to lie as long as somebody has it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memory: StorageWeakRef

    def write(self, result: torch.Tensor) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is not None:  # through a tensor of its own: for who has it, nothing has changed
            result.new_empty(0).set_(storage, 0, result.shape, result.stride()).copy_(result)


class PutOff(TorchDispatchMode):
    """Puts the first product off, and additions to its result, until somebody reads them.

    It sits below autograd: nodes are made as always, and save the tensors whose memory is written later.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.was_needed = False
        """Whether a product was computed after all."""
        self._poisons = poisons()
        self._has_begun = False
        self._sources: set[int] = set()
        """Storages of what is put off is computed from; the operations keep them."""
        self._waiting: list[_Operation] = []
        self._index: dict[int, int] = {}
        """By storage of a result, its operation. The weak reference keeps the number from being used again."""

    @property
    def num_waiting(self) -> int:
        """Operations that are put off."""
        return len(self._waiting)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        operands = tuple(map(self._later, args))
        result = None
        if func in _PRODUCTS and not self._has_begun and _is_right(*args):
            self._has_begun = True
            result = args[-2].new_empty(args[-2].shape[0], args[-1].shape[1])
        elif func is _aten.add.Tensor and any(isinstance(o, _Later) for o in operands) and _are_alike(*args):
            result = torch.empty_like(args[0])
        if result is None:
            if self._waiting and self._needs_what_waits(func, args, kwargs):
                self._compute()
            return func(*args, **kwargs)
        operation = _Operation(func, operands, kwargs, StorageWeakRef(result.untyped_storage()))
        if self._poisons:
            result.fill_(math.nan)
        self._index[operation.memory.cdata] = len(self._waiting)
        self._sources |= {operand.untyped_storage()._cdata for operand in operands if _is_plain(operand)}
        self._waiting.append(operation)
        return result

    def settle(self, outputs: Iterator[torch.Tensor]) -> None:
        """The layer has returned these: what somebody has kept beside them, or has a hook on, is computed."""
        returned: set[int] = set()
        hooked = False
        for tensor in outputs:
            hooked |= bool(tensor._backward_hooks)
            if _is_plain(tensor):
                returned.add(tensor.untyped_storage()._cdata)
        held = (o for o in self._waiting if o.memory.cdata not in returned and not o.memory.expired())
        if hooked or any(held):
            self._compute()

    def _needs_what_waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation reads a result that is put off, or may change what one is computed from."""
        if not isinstance(func, torch._ops.OpOverload):
            return True
        used = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        return bool(used & self._index.keys()) or (func._schema.is_mutable and bool(used & self._sources))

    def _later(self, value: Any) -> Any:
        """An operand, or what stands for it if it is put off."""
        if self._index and _is_plain(value):
            index = self._index.get(value.untyped_storage()._cdata)
            if index is not None:
                return _Later(index, value.shape, value.stride(), value.storage_offset())
        return value

    def _compute(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.was_needed |= bool(waiting)
        results: list[torch.Tensor] = []
        for operation in waiting:
            args = (
                results[arg.index].as_strided(arg.size, arg.stride, arg.offset) if isinstance(arg, _Later) else arg
                for arg in operation.args
            )
            results.append(operation.func(*args, **operation.kwargs))
            operation.write(results[-1])
        self._index.clear()
        self._sources.clear()


def _is_right(*operands: Any) -> bool:
    """Whether a product can be computed later: one that raises has to raise where it is."""
    left, right = operands[-2:]
    return (
        all(_is_plain(operand) and operand.dtype == left.dtype for operand in operands)
        and left.dim() == right.dim() == 2
        and left.shape[1] == right.shape[0]
        and operands[0].shape[-1] in (1, left.shape[1], right.shape[1])
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) in _PLAIN and value.layout is torch.strided


_PLAIN = (torch.Tensor, nn.Parameter)


def _are_alike(left: torch.Tensor, right: Any) -> bool:
    """Whether the sum of two tensors has the form of each."""
    return (
        _is_plain(right)
        and (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        and left.is_contiguous()
        and right.is_contiguous()
    )
