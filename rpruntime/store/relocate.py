"""Structures that name bytes, with the bytes elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rpruntime.store.handle import Extent


def extents_in(value: Any) -> tuple[Extent, ...]:
    """Every extent that a structure (dataclasses and tuples) names, each once, in order."""
    found: dict[Extent, None] = {}

    def note(extent: Extent) -> Extent:
        found[extent] = None
        return extent

    relocated(value, note)
    return tuple(found)


def relocated(value: Any, move: Callable[[Extent], Extent]) -> Any:
    """The same structure with each extent replaced by `move(extent)`."""
    if isinstance(value, Extent):
        return move(value)
    if isinstance(value, tuple):
        return tuple(relocated(item, move) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: relocated(getattr(value, field.name), move) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value
