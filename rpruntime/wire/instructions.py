"""Instructions that every machine gives to its shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpruntime.store.handle import Extent


@dataclass(frozen=True)
class Send:
    """Send a message to a role."""

    role: str
    msg: Any


@dataclass(frozen=True)
class FreeOwn:
    """Free extents of this process's own arena."""

    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Forget:
    """Drop the mappings of segments that are not read any more."""

    segments: tuple[str, ...]
