"""A causal LM as layers: the model's own forward, taken apart at the calls of its blocks.

Nothing of a model's forward is written again here. The first layer runs the base model's own forward with every block
replaced by a `_Recorder`, which notes what it is called with: embedding, masks and rotary tables come out as this
version of transformers makes them, once for a micro-batch. Each block is called with what was noted for it. The last
layer runs the final norm, then the causal LM's own forward with the base model replaced by what it would have
returned: head, soft cap and scaling.

    Prelude(input_ids, ...) -> Stream -> Block(stream) -> Stream -> ... -> Tail(stream) -> logits [B, S, V]
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rpruntime.errors import ConfigError

_PLAIN = (str, int, float, bool, type(None))
_NOT_TAKEN = ("output_router_logits", "output_hidden_states", "output_attentions")
_OFF = {
    "use_cache": False,
    "output_hidden_states": False,
    "output_attentions": False,
    "output_router_logits": False,
    "return_dict": True,
}


@dataclass(frozen=True)
class Stream:
    """What passes from layer to layer. All but `hidden` is passed on as it is, so that it keeps its handle.

    Attributes:
        hidden: [B, S, H].
        calls: the different (further positional arguments, keyword arguments) with which blocks are called.
        call_of: for each block its place in `calls`.
        labels: [B, S], if the last layer is to compute the loss.
        head_kwargs: for the causal LM's own forward.
    """

    hidden: Tensor
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    call_of: tuple[int, ...]
    labels: Tensor | None = None
    head_kwargs: dict[str, Any] | None = None


class _Recorded(Exception):
    """All blocks have been called; nothing behind them is to run."""


class _Recorder(nn.Module):
    """Stands where a block stands, and notes how it is called."""

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__()
        _copy_plain(block, self)
        for name, part in block.named_children():  # some models look for the kind of attention in the block's parts
            if not isinstance(part, nn.ModuleList):
                self.add_module(name, _copy_plain(part, nn.Module()))
        self._rp_last = last
        self._rp_notes: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._rp_notes.append((args, kwargs))
        if self._rp_last:
            raise _Recorded
        return _Unchanged(args[0] if args else kwargs.get("hidden_states"))

    def taken(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(hidden states, further arguments, keyword arguments) of its one call."""
        (args, kwargs), *more = self._rp_notes
        assert not more, "a block is called twice in one forward"
        if args:
            return args[0], args[1:], kwargs
        return kwargs["hidden_states"], (), {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _copy_plain(module: nn.Module, to: nn.Module) -> nn.Module:
    """Give `to` the settings of `module`: attributes that are no tensor, module or object."""
    plain = {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
    to.__dict__.update({name: value for name, value in plain.items() if name not in to.__dict__})
    return to


class _Unchanged:
    """A block's result as the base model sees it: some blocks return a tensor, some a tuple that begins with one."""

    def __init__(self, hidden: Any) -> None:
        self._hidden = hidden

    def __getitem__(self, _: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_hidden"], name)


class _Result:
    """What the base model would have returned: `last_hidden_state`, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands where the base model stands, for the causal LM's own forward."""

    def __init__(self, inner: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in inner.items():
            self.add_module(name, module)
        self.result: _Result | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


def shell(module: nn.Module, children: dict[str, nn.Module]) -> Any:
    """A copy of a module with its own parameters and buffers, and with these submodules instead of its own."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = children
    config = getattr(module, "config", None)
    if config is not None:
        config = copy.deepcopy(config)  # the user's stays as it is
        for name, value in _OFF.items():
            if hasattr(config, name) or name == "use_cache":
                setattr(config, name, value)
        copied.config = config
    return copied


class Wrapper(nn.Module):
    """A layer made of a model's parts.

    Attributes:
        shown_as: the class to name in errors.
        follows: (module of ours, the model's module) whose train or eval mode it takes over; stays in the script.
    """

    shown_as: str = ""
    follows: tuple[tuple[nn.Module, nn.Module], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "follows"}


class Prelude(Wrapper):
    """Position 0: embedding, masks and rotary tables of one micro-batch.

    Args:
        model: the causal LM.
        path: the attributes that lead from it to the owner of the blocks.
        blocks: the owner's attribute with the list of blocks.
        norm: the owner's attribute with the final norm.
        takes_labels: labels travel along for a loss in the last layer.
    """

    def __init__(self, model: nn.Module, path: tuple[str, ...], blocks: str, norm: str, *, takes_labels: bool) -> None:
        super().__init__()
        chain = [getattr_path(model, path[: depth + 1]) for depth in range(len(path))]
        owner = chain[-1]
        listed = getattr(owner, blocks)
        recorders = [_Recorder(block, last=index == len(listed) - 1) for index, block in enumerate(listed)]
        children = {
            name: fresh(child) if is_rotary(child) else child
            for name, child in owner._modules.items()
            if name not in (blocks, norm)
        }
        self._owner = inner = shell(owner, {**children, blocks: nn.ModuleList(recorders)})
        follows = [(inner, owner)]
        for outer, name in zip(reversed(chain[:-1]), reversed(path[1:]), strict=True):
            inner = shell(outer, {**outer._modules, name: inner})
            follows.append((inner, outer))
        self.base = inner
        self.follows = ((self, model), *follows)
        self._recorders = recorders
        self._takes_labels = takes_labels
        self._accepts = parameters_of(chain[0].forward)
        self._head_accepts = parameters_of(model.forward)
        self.shown_as = type(model.get_input_embeddings()).__name__  # type: ignore[operator]

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Stream:
        labels = kwargs.pop("labels", None)
        head = {"logits_to_keep": kwargs.pop("logits_to_keep")} if "logits_to_keep" in kwargs else None
        if head and not self._head_accepts("logits_to_keep"):
            head = None  # then all logits are computed
        if labels is not None and not self._takes_labels:
            raise ConfigError("leave the labels out here: they belong to forward_backward and evaluate")
        self._refuse(kwargs)
        if self._accepts("use_cache"):
            kwargs["use_cache"] = False
        rotary = {name: module for name, module in self._owner._modules.items() if is_rotary(module)}
        try:
            self._owner._modules.update({name: fresh(module) for name, module in rotary.items()})
            self.base(input_ids=input_ids, **kwargs)
        except _Recorded:
            pass
        finally:
            self._owner._modules.update(rotary)
            notes = [recorder._rp_notes for recorder in self._recorders]
            taken = [recorder.taken() for recorder in self._recorders] if all(notes) else []
            for note in notes:
                note.clear()
        if not taken:
            raise ConfigError("the model's forward did not call each of its blocks")
        calls: dict[Any, tuple[int, tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        call_of = []
        for _, args, named in taken:
            place, _ = calls.setdefault(_identity((args, named)), (len(calls), (args, named)))
            call_of.append(place)
        return Stream(taken[0][0], tuple(call for _, call in calls.values()), tuple(call_of), labels, head)

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        for name in _NOT_TAKEN:
            if kwargs.pop(name, False):
                raise ConfigError(f"{name}=True: only logits leave the model here; leave it out")
        if kwargs.pop("use_cache", False):
            raise ConfigError("use_cache=True: there is no cache here; leave it out")
        for name in ("past_key_values", "cache"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name}: there is no cache here; leave it out")
            kwargs.pop(name, None)
        kwargs.pop("return_dict", None)


class Block(Wrapper):
    """One of the model's blocks."""

    def __init__(self, block: nn.Module, index: int, model: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.shown_as = type(block).__name__
        self.follows = ((self, model),)
        self._index = index

    def forward(self, stream: Stream) -> Stream:
        args, kwargs = without_graph(stream.calls[stream.call_of[self._index]])
        result = self.block(stream.hidden, *args, **kwargs)
        return replace(stream, hidden=result[0] if isinstance(result, tuple) else result)


class Tail(Wrapper):
    """The last position: final norm and head, [B, S, V] logits; with labels in the stream, what `loss` makes of
    `(hidden, head, labels)`."""

    def __init__(
        self, model: nn.Module, path: tuple[str, ...], norm: str, loss: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        owner = getattr_path(model, path)
        self.norm = getattr(owner, norm)
        inner: dict[str, nn.Module] = {}
        stubs: list[_Stub] = []
        for name in reversed(path):
            stubs.append(_Stub(inner))
            inner = {name: stubs[-1]}
        self._stubs = stubs
        self.model = shell(model, {**model._modules, **inner})  # type: ignore[dict-item]
        self.follows = ((self, model), (self.model, model))
        self._use_cache = {"use_cache": False} if parameters_of(model.forward)("use_cache") else {}
        self.head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self.shown_as = type(self.head).__name__
        self._loss = loss

    def forward(self, stream: Stream) -> Tensor:
        hidden = self.norm(stream.hidden)
        if stream.labels is not None and self._loss is not None:
            return self._loss(hidden, self.head, stream.labels)
        return self.logits(hidden, **(stream.head_kwargs or {}))

    def logits(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """What the causal LM makes of the base model's result `hidden` [B, S, H]."""
        for stub in self._stubs:
            stub.result = _Result(hidden)
        try:
            return self.model(**self._use_cache, **kwargs).logits
        finally:
            for stub in self._stubs:
                stub.result = None


def getattr_path(module: nn.Module, path: tuple[str, ...]) -> Any:
    """`module.a.b` for ("a", "b")."""
    for name in path:
        module = getattr(module, name)
    return module


class parameters_of:
    """`parameters_of(function)(name)`: whether it has a parameter of that name. Travels to workers as names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names = frozenset(inspect.signature(function).parameters)

    def __call__(self, name: str) -> bool:
        return name in self._names


def is_rotary(module: nn.Module | None) -> bool:
    """Whether it makes rotary tables."""
    return module is not None and "rotary" in type(module).__name__.lower()


def fresh(rotary: nn.Module) -> nn.Module:
    """A copy with buffers of its own, as at first: tables that depend on the sequence's length are each micro-batch's
    own, so they depend neither on what ran before nor on the device."""
    copied = copy.copy(rotary)
    buffers = {name: None if buffer is None else buffer.clone() for name, buffer in rotary._buffers.items()}
    copied.__dict__["_buffers"] = buffers
    for name in [name for name in buffers if name.endswith("inv_freq") and not name.endswith("original_inv_freq")]:
        prefix = name.removesuffix("inv_freq")
        original = getattr(rotary, f"{prefix}original_inv_freq", None)
        if isinstance(original, Tensor):
            buffers[name] = original.clone()
            if f"{prefix}original_inv_freq" not in buffers:  # it may be the buffer itself, which travels by name
                setattr(copied, f"{prefix}original_inv_freq", original.clone())
        copied.__dict__.pop(f"{prefix}long_inv_freq", None)  # made again when it is wanted
    if hasattr(rotary, "original_max_seq_len"):
        copied.max_seq_len_cached = rotary.original_max_seq_len
    return copied


def without_graph(value: Any) -> Any:
    """The same with tensors that take no gradient."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(without_graph(item) for item in value)
    if type(value) is dict:
        return {key: without_graph(item) for key, item in value.items()}
    return value


def _identity(value: Any) -> Any:
    """Equal for values made of the same objects."""
    if isinstance(value, tuple | list):
        return tuple(_identity(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _identity(item)) for key, item in value.items())
    return (type(value), value) if type(value) in _PLAIN else id(value)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
