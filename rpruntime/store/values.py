"""Python values with tensors inside, as payloads: what passes between two stages, and code objects.

The pickler takes every tensor out by identity, so any container works without registration and a tensor that
occurs twice stays one tensor.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

SINGLE_TENSOR = b""
"""The skeleton of a value that is just one tensor."""


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._tensors[pid]


def take_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """(skeleton, tensors) of a value; each distinct tensor object once, in order of first occurrence.

    Raises whatever pickling an object in it raises.
    """
    if type(value) is torch.Tensor:
        return SINGLE_TENSOR, [value]
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def put_together(skeleton: bytes, tensors: Sequence[Any]) -> Any:
    """The value of a skeleton with these tensors (or stand-ins) in their places."""
    if skeleton == SINGLE_TENSOR:
        return tensors[0]
    return _TensorUnpickler(skeleton, tensors).load()


def why_not_picklable(value: Any, name: str) -> str:
    """Names the innermost attribute of `value` that cannot be pickled, for error messages: "model.hook.lock"."""
    seen: set[int] = set()

    def fails(obj: Any) -> Exception | None:
        try:
            take_apart(obj)
        except Exception as err:
            return err
        return None

    def parts(obj: Any) -> list[tuple[str, Any]]:
        if isinstance(obj, dict):
            return [(f"[{key!r}]", item) for key, item in obj.items()]
        if isinstance(obj, list | tuple | set | frozenset):
            return [(f"[{index}]", item) for index, item in enumerate(obj)]
        found: list[tuple[str, Any]] = [(f".{key}", item) for key, item in getattr(obj, "__dict__", {}).items()]
        closure = getattr(obj, "__closure__", None) or ()
        names = getattr(getattr(obj, "__code__", None), "co_freevars", ())
        for variable, cell in zip(names, closure, strict=False):
            try:
                found.append((f" -> variable {variable}", cell.cell_contents))
            except ValueError:
                continue  # an empty cell holds nothing to pickle
        return found

    def search(obj: Any, path: str) -> str | None:
        err = fails(obj)
        if err is None or id(obj) in seen:
            return None
        seen.add(id(obj))
        for suffix, part in parts(obj):
            inner = search(part, path + suffix)
            if inner is not None:
                return inner
        return f"{path} ({type(obj).__name__}): {err}"

    return search(value, name) or name
