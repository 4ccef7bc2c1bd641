"""Cuts one call's inputs and labels into micro-batches, weighs their losses, and merges what comes back.

Pure: no devices, no processes, no state. Everything here sees a call as a tree: mappings, lists, tuples,
namedtuples, dataclasses and containers registered with torch's pytree are inner nodes (rebuilt with their own type),
tensors are cut, anything else is a leaf that every micro-batch gets as it is; one that holds tensors is refused.

A tensor counts as "of the batch" when its dim 0 equals the number of rows. If a dim 0 of another meaning
happens to have that size (3 rows and positions of shape [3, 3, S]), nothing here can tell: `chunk_dims` must
say so.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from rpruntime.errors import ConfigError

ChunkDims = Mapping[Any, "int | None"]
_Loss = TypeVar("_Loss", Tensor, float)


@dataclass(frozen=True)
class Coefficient:
    """What a micro-batch's mean loss is multiplied and divided by within its call."""

    numerator: float
    denominator: float

    def apply(self, loss: _Loss) -> _Loss:
        """Return the contribution of `loss` (0-d tensor or float), in its own dtype.

        With numerator 0 that is a constant 0 without a graph, also when `loss` is NaN (a mean over nothing):
        there is nothing to differentiate then.
        """
        if self.numerator == 0:
            return torch.zeros_like(loss) if isinstance(loss, Tensor) else 0.0
        if self.numerator == 1:
            return loss / self.denominator
        return loss * self.numerator / self.denominator


@dataclass(frozen=True)
class CutCall:
    """One call as M micro-batches; every list has M entries, in order."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]  # None each if the call has none
    rows: list[int]
    coefficients: list[Coefficient]
    weights: list[float]  # loss_weight(labels), else the rows
    warning: str | None  # set if M had to be lowered to the number of rows
    dims: tuple[int, ...] = (0,)  # dims that were cut, that of the rows first: where outputs are joined


def cut_call(
    inputs: Any,
    labels: Any,
    *,
    num_microbatches: int,
    chunk_dims: ChunkDims | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
    num_items: float | Tensor | None = None,
    may_be_zero: bool = False,
) -> CutCall:
    """Cut a call into micro-batches of views.

    Args:
        inputs: a tuple is positional arguments, a mapping is keyword arguments, a list is micro-batches
            already cut (each a tuple, mapping or single argument; `labels` is then a list as long, or None;
            M is its length and nothing in it is cut), anything else is one positional argument.
        labels: any tree, or None. The rows are dim 0 of its first tensor (of at least one dim), else of the
            first in `inputs`. Tensors with that dim 0 are cut by `torch.tensor_split`, one with another is
            an error; 0-d tensors and everything that is not a tensor (per-row Python lists and NumPy arrays
            too) go to every micro-batch as they are.
        num_microbatches: M, at least 1; lowered to the number of rows if those are fewer.
        chunk_dims: the dim to cut every tensor of an argument along, None for "not cut"; keys are keyword
            names, positions, and "labels". The rows are looked for along the same dims.
        loss_weight: called once per micro-batch with its labels; a number or 0-d tensor, 0 or more.
        num_items: the divisor of the whole, instead of this call's sum of weights (or rows).
        may_be_zero: a batch of which nothing counts is no error; its coefficients mean nothing.

    Raises:
        ConfigError: a tensor's size does not fit the rows (names it and the `chunk_dims` to write), no rows,
            an unknown key in `chunk_dims`, weights that are all 0, or an argument out of range.
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ConfigError(f"num_microbatches must be an int of at least 1, not {num_microbatches!r}")
    dims = dict(chunk_dims or {})
    warning = None
    if isinstance(inputs, list):
        calls = _already_cut(inputs, labels)
        _check_chunk_dims(dims, calls)
        rows = [_rows_of_part(call, dims, f"micro-batch {m}") for m, call in enumerate(calls)]
    else:
        call = _Call.of(inputs, labels)
        _check_chunk_dims(dims, [call])
        total, source = call.find_rows(dims)
        if total is None:
            if num_microbatches > 1:
                raise ConfigError(
                    f"the call has no tensor with rows to cut into {num_microbatches} micro-batches: pass "
                    "tensors, pass a list of micro-batches already cut, or set num_microbatches=1"
                )
            calls, rows = [call], [1]
        elif total == 0:
            raise ConfigError(f"the batch has no rows ({source} is 0)")
        else:
            num = min(num_microbatches, total)
            if num < num_microbatches:
                warning = (
                    f"the batch has {total} row{'s' * (total > 1)} ({source}), fewer than "
                    f"num_microbatches={num_microbatches}: such calls run {num} micro-batch{'es' * (num > 1)}"
                )
            calls = call.cut(_Cutter(total, source, num, dims))
            rows = [total // num + (m < total % num) for m in range(num)]
    parts = [call.labels for call in calls]
    weights = _weights(parts, rows, loss_weight, may_be_zero=may_be_zero)
    return CutCall(
        args=[call.args for call in calls],
        kwargs=[call.kwargs for call in calls],
        labels=parts,
        rows=rows,
        coefficients=_coefficients(weights, loss_weight is not None, num_items),
        weights=weights,
        warning=warning,
        dims=_dims_cut(calls[0], dims),
    )


def take_labels(inputs: Any, labels: Any, *, keep: bool) -> tuple[Any, Any]:
    """Take the entry "labels" out of a dict of inputs, or out of each of a list of them; `keep`: it stays there too.

    Raises:
        ConfigError: there are labels already, or only some micro-batches have them.
    """
    parts = inputs if isinstance(inputs, list) else [inputs]
    found = [isinstance(part, Mapping) and part.get("labels") is not None for part in parts]
    if not any(found):
        if keep and labels is not None:
            raise ConfigError('this loss is computed in the last layer: pass labels as the entry "labels" of a dict')
        return inputs, labels
    if labels is not None:
        raise ConfigError('there are labels, and the dict of inputs has the entry "labels" too: pass one of them')
    if not all(found):
        raise ConfigError(f'micro-batch {found.index(False)} has no entry "labels", and others have: pass all or none')
    rest = parts if keep else [{key: part[key] for key in part if key != "labels"} for part in parts]
    taken = [part["labels"] for part in parts]
    return (rest, taken) if isinstance(inputs, list) else (rest[0], taken[0])


def merge_outputs(
    outputs: list[Any], rows: list[int], weights: list[float] | None = None, dims: Sequence[int] = (0,)
) -> Any:
    """Join what the model returned for each micro-batch; the inverse of the cut.

    Args:
        outputs: one tree per micro-batch, all of the same structure.
        rows: the micro-batches' rows. Tensors are joined along the first of `dims` that has that size in every
            micro-batch; other tensors must be equal everywhere, and are kept.
        weights: for the average of 0-d floating tensors and Python floats that differ (default: `rows`).
        dims: the dims along which the call was cut (`CutCall.dims`).

    Returns the merged tree; a single output is returned as it is. Other leaves must be equal, and are kept.
    A tensor equal everywhere where one of `dims` happens to be the rows of every micro-batch is joined: nothing
    tells it from a cut one.

    Raises:
        ConfigError: naming the place in the output that cannot be merged.
    """
    assert len(outputs) == len(rows) > 0, (len(outputs), len(rows))
    if len(outputs) == 1:
        return outputs[0]
    weights = [float(n) for n in rows] if weights is None else weights
    assert len(weights) == len(rows), (len(weights), len(rows))
    return _merge(outputs, _Join(rows, weights, tuple(dims)), "output")


def merge_metrics(metrics: list[dict[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Average each metric by weight over the micro-batches that have it (NaN if those all weigh 0)."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for metric, weight in zip(metrics, weights, strict=True):
        for name, value in metric.items():
            pairs.setdefault(name, []).append((float(value), weight))
    return {name: _mean(found) for name, found in pairs.items()}


# ---- trees


def _registered(value: Any) -> Any:
    """How torch's pytree takes a container apart that a user has registered; None: what we know, or a leaf."""
    if isinstance(value, (Mapping, list, tuple, Tensor, str)):
        return None
    return SUPPORTED_NODES.get(type(value))


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """The (path suffix, child) pairs of an inner node in order; None for a leaf."""
    if _registered(value) is not None:
        return [(f"<{i}>", child) for i, child in enumerate(_registered(value).flatten_fn(value)[0])]
    if isinstance(value, Mapping):  # before dataclasses: a transformers ModelOutput is both
        return [(f"[{key!r}]", value[key]) for key in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, old: list[tuple[str, Any]], new: list[Any]) -> Any:
    """`value` with other children: its type and its other attributes stay, `__init__` is not run again."""
    if all(child is before for child, (_, before) in zip(new, old, strict=True)):
        return value
    node = _registered(value)
    if node is not None:
        return node.unflatten_fn(list(new), node.flatten_fn(value)[1])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(dict(zip(value, new, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple):
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    result = copy.copy(value)
    if isinstance(value, MutableMapping):
        for key, child in zip(value, new, strict=True):
            result[key] = child
    elif isinstance(value, list):
        result[:] = new
    else:
        for field, child in zip(dataclasses.fields(value), new, strict=True):
            object.__setattr__(result, field.name, child)  # frozen ones too
    return result


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of at least one dim, depth first."""
    if isinstance(value, Tensor):
        if value.dim():
            yield path, value
        return
    for suffix, child in _children(value) or ():
        yield from _tensors(child, path + suffix)


# ---- cutting


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any

    @staticmethod
    def of(inputs: Any, labels: Any) -> _Call:
        if isinstance(inputs, tuple):
            return _Call(tuple(inputs), {}, labels)
        if not isinstance(inputs, Mapping):
            return _Call((inputs,), {}, labels)
        for key in inputs:
            if not isinstance(key, str):
                raise ConfigError(
                    f"a dict of inputs is keyword arguments, but has the key {key!r}: to pass the dict "
                    "as one argument, write (batch,)"
                )
        return _Call((), {key: inputs[key] for key in inputs}, labels)

    def roots(self) -> list[tuple[int | str, str, Any]]:
        """(key in chunk_dims, path in messages, value), in the order in which rows are looked for."""
        return [
            ("labels", "labels", self.labels),
            *((i, f"argument {i}", value) for i, value in enumerate(self.args)),
            *((name, name, value) for name, value in self.kwargs.items()),
        ]

    def find_rows(self, dims: ChunkDims) -> tuple[int | None, str]:
        """The size of the first tensor that is to be cut, and what it was taken from."""
        for key, path, value in self.roots():
            dim = dims.get(key, 0)
            if dim is None:
                continue
            for where, tensor in _tensors(value, path):
                return _size(tensor, where, dim), f"dim {dim} of {where}"
        return None, ""

    def cut(self, cutter: _Cutter) -> list[_Call]:
        labels, *rest = (cutter.cut(value, path, key) for key, path, value in self.roots())
        num_args = len(self.args)
        return [
            _Call(
                tuple(pieces[m] for pieces in rest[:num_args]),
                {name: pieces[m] for name, pieces in zip(self.kwargs, rest[num_args:], strict=True)},
                labels[m],
            )
            for m in range(cutter.num)
        ]


@dataclass(frozen=True)
class _Cutter:
    rows: int
    source: str  # where `rows` was found, for messages
    num: int
    dims: ChunkDims

    def cut(self, value: Any, path: str, key: int | str) -> list[Any]:
        """`num` pieces of an argument known to `chunk_dims` as `key`."""
        dim = self.dims.get(key, 0)
        if isinstance(value, Tensor) and value.dim() and dim is not None:
            if _size(value, path, dim) != self.rows:
                raise ConfigError(self._mismatch(value, path, key, dim))
            try:
                return list(torch.tensor_split(value, self.num, dim))
            except RuntimeError as err:  # layouts without tensor_split: sparse, nested
                raise ConfigError(f"{path} cannot be cut along dim {dim}: {err}") from err
        children = _children(value) if dim is not None else None
        if children is None:
            self._check_leaf(value, path, key, dim)
            return [value] * self.num
        pieces = [self.cut(child, path + suffix, key) for suffix, child in children]
        return [_rebuild(value, children, [piece[m] for piece in pieces]) for m in range(self.num)]

    def _check_leaf(self, value: Any, path: str, key: int | str, dim: int | None) -> None:
        """An object with rows in it would go whole to every micro-batch, and count so many times."""
        held = [] if dim is None or isinstance(value, torch.nn.Module) else list(getattr(value, "__dict__", {}).items())
        for name, tensor in held:
            fits = isinstance(tensor, Tensor) and -tensor.dim() <= (dim or 0) < tensor.dim()
            if fits and tensor.shape[dim or 0] == self.rows:
                kind = type(value).__name__
                raise ConfigError(
                    f"{path} is a {kind} with rows in {path}.{name}, and nothing says how to cut it: make {kind} a "
                    "dataclass, register it with torch.utils._pytree.register_pytree_node, or pass "
                    f"{self._paste(key, None)} to give it whole to every micro-batch"
                )

    def _mismatch(self, tensor: Tensor, path: str, key: int | str, dim: int) -> str:
        fits = [d for d, size in enumerate(tensor.shape) if size == self.rows]
        along = f"{self._paste(key, fits[0])} to cut it along dim {fits[0]}, or " if fits else ""
        return (
            f"{path} has shape {list(tensor.shape)}, its dim {dim} is not the {self.rows} rows of the batch "
            f"({self.source}). Pass {along}{self._paste(key, None)} to give it whole to every micro-batch; "
            f"if the rows were taken from the wrong tensor, name that one in chunk_dims instead"
        )

    def _paste(self, key: int | str, dim: int | None) -> str:
        entries = {**self.dims, key: dim}
        return "chunk_dims={" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in entries.items()) + "}"


def _size(tensor: Tensor, path: str, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(f"chunk_dims: {path} has shape {list(tensor.shape)}, so no dim {dim} to cut")
    return tensor.shape[dim]


def _already_cut(inputs: list[Any], labels: Any) -> list[_Call]:
    hint = "a list of inputs is micro-batches already cut (for positional arguments pass a tuple)"
    if not inputs:
        raise ConfigError(f"the list of inputs is empty; {hint}")
    if labels is None:
        labels = [None] * len(inputs)
    if not isinstance(labels, list) or len(labels) != len(inputs):
        got = f"{len(labels)} of them" if isinstance(labels, list) else type(labels).__name__
        raise ConfigError(f"{hint}: labels must be a list of {len(inputs)} or None, not {got}")
    return [_Call.of(part, label) for part, label in zip(inputs, labels, strict=True)]


def _rows_of_part(call: _Call, dims: ChunkDims, what: str) -> int:
    rows, source = call.find_rows(dims)
    if rows == 0:
        raise ConfigError(f"{what} has no rows ({source} is 0)")
    return 1 if rows is None else rows


def _dims_cut(call: _Call, dims: ChunkDims) -> tuple[int, ...]:
    """The dims of all arguments that were cut, that of the rows first, and dim 0."""
    found = [dims.get(key, 0) for key, path, value in call.roots() if any(True for _ in _tensors(value, path))]
    return tuple(dict.fromkeys([*(dim for dim in found if dim is not None), 0]))


def _check_chunk_dims(dims: ChunkDims, calls: list[_Call]) -> None:
    known = list(dict.fromkeys(key for call in calls for key, _, _ in call.roots()))
    for key, dim in dims.items():
        if key not in known:
            names = ", ".join(map(repr, known))
            raise ConfigError(f"chunk_dims names {key!r}, which this call does not have; it has {names}")
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ConfigError(f"chunk_dims[{key!r}] must be an int (the dim to cut) or None, not {dim!r}")


# ---- weighing


def _weights(
    labels: list[Any], rows: list[int], loss_weight: Callable[[Any], Any] | None, *, may_be_zero: bool
) -> list[float]:
    if loss_weight is None:
        return [float(n) for n in rows]
    if all(label is None for label in labels):
        raise ConfigError(
            "the call has no labels, and the loss weighs micro-batches by them: pass labels, for a causal LM as the "
            "entry 'labels' of the batch"
        )
    what = "loss_weight(labels) of micro-batch"
    weights = [_number(loss_weight(label), f"{what} {m}") for m, label in enumerate(labels)]
    if not any(weights) and not may_be_zero:
        raise ConfigError(
            "no label of the batch counts (all are ignored, -100 for a causal LM; loss_weight is 0 for every "
            "micro-batch), so the call has no loss: leave such batches out"
        )
    return weights


def _coefficients(weights: list[float], weighted: bool, num_items: float | Tensor | None) -> list[Coefficient]:
    if num_items is not None:
        total = _number(num_items, "num_items")
        if total == 0:
            raise ConfigError("num_items must be more than 0")
    elif not weighted and len(set(weights)) == 1:
        return [Coefficient(1.0, float(len(weights)))] * len(weights)
    else:
        total = sum(weights)
    return [Coefficient(weight, total) for weight in weights]


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Tensor) or value.dim() == 0:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number) and number >= 0:
            return number
    raise ConfigError(f"{what} must be a finite number or 0-d tensor, 0 or more, not {value!r}")


# ---- merging


@dataclass(frozen=True)
class _Join:
    rows: list[int]
    weights: list[float]
    dims: tuple[int, ...]


def _merge(values: list[Any], join: _Join, path: str) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise _unmergeable(path, len(values), f"it is of different types: {kinds}")
    if isinstance(first, Tensor):
        return _merge_tensors(values, join, path)
    children = _children(first)
    if children is None:
        if all(_same(first, value) for value in values[1:]):
            return first
        if isinstance(first, float):
            return _mean(list(zip(values, join.weights, strict=True)))
        raise _unmergeable(path, len(values), f"its values differ ({type(first).__name__})")
    nodes = [_children(value) or [] for value in values]
    names = [suffix for suffix, _ in children]
    if any([suffix for suffix, _ in node] != names for node in nodes):
        raise _unmergeable(path, len(values), "its keys or lengths differ")
    merged = [_merge([node[i][1] for node in nodes], join, path + name) for i, name in enumerate(names)]
    return _rebuild(first, children, merged)


def _merge_tensors(pieces: list[Tensor], join: _Join, path: str) -> Tensor:
    first = pieces[0]
    if any(piece.dtype != first.dtype for piece in pieces):
        raise _unmergeable(path, len(pieces), f"its dtypes differ: {sorted({str(p.dtype) for p in pieces})}")
    dim = _joined_dim(pieces, join)
    if dim is not None:
        return torch.cat(pieces, dim)
    if all(torch.equal(first, piece) for piece in pieces[1:]):
        return first
    if first.is_floating_point() and all(piece.dim() == 0 for piece in pieces):
        mean = _mean([(piece.item(), weight) for piece, weight in zip(pieces, join.weights, strict=True)])
        return first.new_tensor(mean)
    shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
    raise _unmergeable(path, len(pieces), f"shapes {shapes} for rows {join.rows}, and not equal values")


def _joined_dim(pieces: list[Tensor], join: _Join) -> int | None:
    """The dim along which pieces of a tensor lie; None: it was not cut."""
    for dim in join.dims:
        if not all(-piece.dim() <= dim < piece.dim() for piece in pieces):
            continue
        if all(piece.shape[dim] == n for piece, n in zip(pieces, join.rows, strict=True)):
            rest = [piece.movedim(dim, 0).shape[1:] for piece in pieces]
            if all(shape == rest[0] for shape in rest):
                return dim
    return None


def _mean(pairs: list[tuple[float, float]]) -> float:
    """The mean of (value, weight) pairs; a value of weight 0 does not count, whatever it is."""
    counted = [(value, weight) for value, weight in pairs if weight]
    if not counted:
        return math.nan
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # an __eq__ of the user's class, or of an array, that has no single answer
        return False


def _unmergeable(path: str, num: int, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be merged from {num} micro-batches: {why}. Return tensors with the rows where they were cut, "
        "equal values or floating scalars, or run this call as one micro-batch (num_microbatches=1)"
    )
