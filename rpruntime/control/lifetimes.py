"""Who still needs which bytes. The controller alone decides when an extent is freed.

A key (an activation, a gradient, a weight version) has readers; it dies when its producer has committed and its
last reader is gone. Several keys may name one extent (a tensor passed on unchanged): it is freed with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rpruntime.store.handle import Extent
from rpruntime.wire.messages import DataReadyMsg, Key

Reader = Hashable
"""A slot's number, or the name of another holder: "optimizer", ("head", model)..."""


@dataclass
class _Entry:
    readers: set[Reader] = field(default_factory=set)
    extents: tuple[Extent, ...] | None = None  # None until the producer has committed
    announced: tuple[DataReadyMsg, str] | None = None  # what its readers were told, and by whom


class Lifetimes:
    """Readers of every live key and keys of every live extent.

    Args:
        free: told of extents that nobody needs any more.
    """

    def __init__(self, free: Callable[[Iterable[Extent]], None]) -> None:
        self._free = free
        self._entries: dict[Key, _Entry] = {}
        self._reads: dict[Reader, dict[Key, None]] = {}  # ordered, so that a replay frees in the same order
        self._naming: dict[Extent, set[Key]] = {}

    def hold(self, key: Key, reader: Reader) -> None:
        """`reader` will read `key`, whether it exists yet or not."""
        self._entries.setdefault(key, _Entry()).readers.add(reader)
        self._reads.setdefault(reader, {})[key] = None

    def publish(self, key: Key, extents: Iterable[Extent]) -> None:
        """The producer of `key` has committed these extents; if nobody wants it, they are freed."""
        entry = self._entries.setdefault(key, _Entry())
        assert entry.extents is None, f"{key} published twice"
        entry.extents = tuple(dict.fromkeys(extents))
        for extent in entry.extents:
            self._naming.setdefault(extent, set()).add(key)
        if not entry.readers:
            self._free(self._bury(key))

    def provide(self, msg: DataReadyMsg, by: str) -> None:
        """A value that is there before anybody runs: `by` announces and commits it at once."""
        self.announce(msg, by)
        self.publish(msg.key, msg.payload.extents())

    def release(self, reader: Reader, key: Key | None = None) -> None:
        """`reader` is done with `key` (None: with all that it reads)."""
        self._free(self._release(reader, key))

    def drop(self, key: Key) -> None:
        """Forget a cancelled key with all its readers."""
        self._free(self._drop(key))

    def withdraw(self, readers: Iterable[Reader], keys: Iterable[Key]) -> list[Extent]:
        """Release all that these readers hold, then drop these keys; returns what nobody needs now, for the caller to
        free."""
        freed: list[Extent] = []
        for reader in readers:
            freed += self._release(reader)
        for key in keys:
            freed += self._drop(key)
        return freed

    def _release(self, reader: Reader, key: Key | None = None) -> list[Extent]:
        held = self._reads.get(reader, {})
        keys = [key] if key is not None and key in held else ([] if key is not None else list(held))
        freed: list[Extent] = []
        for done in keys:
            del held[done]
            entry = self._entries[done]
            entry.readers.discard(reader)
            if not entry.readers and entry.extents is not None:
                freed += self._bury(done)
        if not held:
            self._reads.pop(reader, None)
        return freed

    def _drop(self, key: Key) -> list[Extent]:
        entry = self._entries.get(key)
        if entry is None:
            return []
        for reader in entry.readers:
            del self._reads[reader][key]
        entry.readers.clear()
        return self._bury(key)

    def extents(self, key: Key) -> tuple[Extent, ...] | None:
        """The extents of a committed key; None: unknown or not committed."""
        entry = self._entries.get(key)
        return None if entry is None else entry.extents

    def announce(self, msg: DataReadyMsg, by: str) -> bool:
        """The readers of a live key were told of it; False: they had been, the first message stays."""
        entry = self._entries.get(msg.key)
        if entry is None or entry.announced is not None:
            return False
        entry.announced = (msg, by)
        return True

    def announced(self, key: Key) -> tuple[DataReadyMsg, str] | None:
        """What the readers of a key were told, and by which role."""
        entry = self._entries.get(key)
        return None if entry is None else entry.announced

    def readers(self, key: Key) -> set[Reader]:
        """Who still reads a key."""
        entry = self._entries.get(key)
        return set() if entry is None else entry.readers

    def live_keys(self) -> list[Key]:
        """Every live key."""
        return list(self._entries)

    def reads(self, reader: Reader) -> frozenset[Key]:
        """What a reader still holds."""
        return frozenset(self._reads.get(reader, ()))

    def unpublished(self, reader: Reader) -> set[Key]:
        """What a reader holds, besides weights, and what nobody has committed yet."""
        return {key for key in self._reads.get(reader, ()) if key[0] != "weights" and self.extents(key) is None}

    def live_extents(self) -> set[Extent]:
        """Every extent that some live key names."""
        return set(self._naming)

    def live_bytes(self) -> dict[str, int]:
        """Bytes that are named, by the kind of the key; an extent that several name counts once."""
        found: dict[str, int] = {}
        seen: set[Extent] = set()
        for key, entry in self._entries.items():
            for extent in entry.extents or ():
                if extent not in seen:
                    seen.add(extent)
                    found[key[0]] = found.get(key[0], 0) + extent.nbytes
        return found

    def slots(self) -> set[int]:
        """Slots that hold something (tests)."""
        return {reader for reader, keys in self._reads.items() if keys and isinstance(reader, int)}

    def holders(self, kind: str) -> set[tuple[Any, ...]]:
        """Those that hold something as ("start", model, iteration) does, by their first word (tests)."""
        named = [reader for reader, keys in self._reads.items() if keys and isinstance(reader, tuple)]
        return {reader for reader in named if reader[0] == kind}

    def _bury(self, key: Key) -> list[Extent]:
        entry = self._entries.pop(key)
        freed = []
        for extent in entry.extents or ():
            names = self._naming[extent]
            names.discard(key)
            if not names:
                del self._naming[extent]
                freed.append(extent)
        return freed

    def validate(self) -> None:
        """Re-derive the two indexes from the entries."""
        reads: dict[Reader, set[Key]] = {}
        naming: dict[Extent, set[Key]] = {}
        for key, entry in self._entries.items():
            assert entry.readers or entry.extents is None, f"{key} is committed and has no reader"
            for reader in entry.readers:
                reads.setdefault(reader, set()).add(key)
            for extent in entry.extents or ():
                naming.setdefault(extent, set()).add(key)
        assert reads == {reader: set(keys) for reader, keys in self._reads.items() if keys}
        assert naming == self._naming
