"""Bytes of a message: the type's name in the first frame, a msgpack map of its fields in the second.

Nested structures (handles, tasks) travel as msgpack extension 1: `[name, {field: value}]`. Sequences decode
as tuples, so that keys stay hashable. Unknown fields are dropped (a newer peer may send more); an unknown type,
a missing field or a broken body is a `ProtocolError` that says which.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import msgpack

MAX_MESSAGE_BYTES = 1 << 20
MAX_STRUCT_DEPTH = 16
"""Structures within structures. Each level is a C call of msgpack with about 50 KB of stack of its own: without a
limit a short message of nested extensions would end the process."""
_STRUCT = 1

T = TypeVar("T")
_MESSAGES: dict[str, type] = {}
_STRUCTS: dict[str, type] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}


class ProtocolError(Exception):
    """A message that this process does not understand; the run goes on without it."""


def message(cls: type[T]) -> type[T]:
    """Declare a frozen dataclass as a message type; its class name goes in the first frame."""
    return _declare(cls, _MESSAGES)


def struct(cls: type[T]) -> type[T]:
    """Declare a frozen dataclass that travels inside messages."""
    return _declare(cls, _STRUCTS)


def message_types() -> dict[str, type]:
    """Every declared message class by name."""
    return dict(_MESSAGES)


def _declare(cls: type[T], table: dict[str, type]) -> type[T]:
    assert dataclasses.is_dataclass(cls), cls
    if table.setdefault(cls.__name__, cls) is not cls:
        raise TypeError(f"two types named {cls.__name__}")
    _FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return cls


def _default(value: Any) -> Any:
    names = _FIELDS.get(type(value))
    if names is None or _STRUCTS.get(type(value).__name__) is not type(value):
        raise TypeError(f"{type(value).__name__} cannot travel in a message")
    fields = {name: getattr(value, name) for name in names}
    return msgpack.ExtType(_STRUCT, _pack([type(value).__name__, fields]))


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_default, use_bin_type=True)
    return packed


def _ext_hook(depth: int, code: int, data: bytes) -> Any:
    if code != _STRUCT:
        raise ProtocolError(f"unknown extension {code}")
    if depth >= MAX_STRUCT_DEPTH:
        raise ProtocolError(f"more than {MAX_STRUCT_DEPTH} structures within each other")
    name, fields = _unpack(data, depth + 1)
    return _build(_STRUCTS, name, fields)


def _unpack(data: bytes, depth: int = 0) -> Any:
    hook = partial(_ext_hook, depth)
    return msgpack.unpackb(data, ext_hook=hook, use_list=False, raw=False, strict_map_key=False)


def _build(table: dict[str, type], name: Any, fields: Any) -> Any:
    cls = table.get(name)
    if cls is None:
        raise ProtocolError(f"unknown type {name!r}")
    if not isinstance(fields, dict):
        raise ProtocolError(f"{name}: the body is not a map")
    known = _FIELDS[cls]
    try:
        return cls(**{key: value for key, value in fields.items() if key in known})
    except TypeError as err:
        raise ProtocolError(f"{name}: {err}") from err


def pack_struct(value: Any) -> bytes:
    """Bytes of a struct alone, for bodies that lie in an arena."""
    return _pack(value)


def unpack_struct(data: bytes) -> Any:
    """The struct of `pack_struct`; for bytes of an authenticated process (broken ones raise what msgpack raises)."""
    return _unpack(data)


def encode(msg: Any) -> list[bytes]:
    """Frames of a message.

    Raises:
        ValueError: the message is larger than `MAX_MESSAGE_BYTES` (bulk bytes belong in an arena).
    """
    name = type(msg).__name__
    assert _MESSAGES.get(name) is type(msg), f"{name} is not a message"
    body = _pack({field: getattr(msg, field) for field in _FIELDS[type(msg)]})
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{name} of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return [name.encode(), body]


def decode(frames: list[bytes]) -> Any:
    """The message of these frames.

    Raises:
        ProtocolError: not two frames, too large, unknown type, missing field or broken msgpack.
    """
    if len(frames) != 2:
        raise ProtocolError(f"{len(frames)} frames instead of 2")
    if len(frames[1]) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a body of {len(frames[1])} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _build(_MESSAGES, frames[0].decode(), _unpack(frames[1]))
    except ProtocolError:
        raise
    except Exception as err:  # msgpack raises many unrelated types on broken input
        raise ProtocolError(f"broken message: {err}") from err
