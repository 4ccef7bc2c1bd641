"""The published versions of a model's weights that can still be read, and the loss scales that go with them."""

from __future__ import annotations

from collections.abc import Iterable

from rpruntime.control.lifetimes import Lifetimes, Reader
from rpruntime.control.outbox import Outbox
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import Key, WeightsReadyMsg

MAX_UNITS_A_MESSAGE = 1000


class Versions:
    """Of one model.

    Attributes:
        readable: numbers of each unit's versions that are still readable, ascending; the last is the newest.
        set_scales: version -> loss scale of the iterations that read it, where the script has set another one than the
            optimizer told.
    """

    def __init__(self, model: int, lifetimes: Lifetimes, out: Outbox) -> None:
        self.readable: dict[int, list[int]] = {}
        self.set_scales: dict[int, float] = {}
        self._model = model
        self._lifetimes = lifetimes
        self._out = out
        self._scales: dict[int, float] = {}
        """As the optimizer told."""

    def publish(self, msg: WeightsReadyMsg, read: int, oldest: int) -> None:
        """The optimizer has written some.

        Args:
            read: the version that the open iteration reads.
            oldest: the lowest one that some slot may read.
        """
        self._scales.setdefault(msg.version, msg.loss_scale)
        self._scales = {version: scale for version, scale in self._scales.items() if version >= oldest}
        for unit, extent in msg.units:
            if msg.version <= self.readable.get(unit, [-1])[-1]:
                continue  # repeated; version 0 was known from loading
            key = self._key(unit, msg.version)
            self._lifetimes.hold(key, ("readable", self._model))
            self._lifetimes.publish(key, (extent,))
            self.readable.setdefault(unit, []).append(msg.version)
            self._retire(unit, read)

    def retire(self, read: int) -> None:
        """Let go of versions that are not the newest and that neither the open iteration, which reads version `read`,
        nor a later one reads."""
        for unit in self.readable:
            self._retire(unit, read)

    def _retire(self, unit: int, read: int) -> None:
        versions = self.readable[unit]
        while len(versions) > 1 and versions[0] < read:
            self._lifetimes.release(("readable", self._model), self._key(unit, versions.pop(0)))

    def hold(self, versions: Iterable[int], reader: Reader) -> None:
        """Somebody besides slots will read these versions of all units."""
        for key in self.keys(versions):
            self._lifetimes.hold(key, reader)

    def newest(self) -> dict[int, Extent]:
        """Where the newest version of each unit lies."""
        return {unit: self._extent(unit, versions[-1]) for unit, versions in self.readable.items()}

    def places(self, version: int) -> dict[int, Extent]:
        """Where one version of each unit lies; somebody holds it."""
        return {unit: self._extent(unit, version) for unit in self.readable}

    def _extent(self, unit: int, version: int) -> Extent:
        extents = self._lifetimes.extents(self._key(unit, version))
        assert extents is not None
        return extents[0]

    def send(self, role: str) -> None:
        """Tell a worker all that is there."""
        by_version: dict[int, list[tuple[int, Extent]]] = {}
        for key in self._live_keys():
            extents = self._lifetimes.extents(key)
            if extents is not None:
                by_version.setdefault(key[3], []).append((key[2], extents[0]))
        for version, units in sorted(by_version.items()):
            for start in range(0, len(units), MAX_UNITS_A_MESSAGE):
                part = tuple(units[start : start + MAX_UNITS_A_MESSAGE])
                scale = self._scales.get(version, 1.0)
                self._out.send(role, WeightsReadyMsg(self._model, version, part, scale))

    def forget(self) -> None:
        """The model is gone; the optimizer frees its slabs when it unloads."""
        self._lifetimes.withdraw((), self._live_keys())

    def _key(self, unit: int, version: int) -> Key:
        return ("weights", self._model, unit, version)

    def keys(self, versions: Iterable[int]) -> list[Key]:
        """These versions of all units."""
        return [self._key(unit, version) for unit in self.readable for version in versions]

    def _live_keys(self) -> list[Key]:
        return [key for key in self._lifetimes.live_keys() if key[:2] == ("weights", self._model)]

    def validate(self) -> None:
        """What is held as readable is what is listed (tests)."""
        listed = {self._key(unit, version) for unit, versions in self.readable.items() for version in versions}
        assert self._lifetimes.reads(("readable", self._model)) == listed
        assert all(versions == sorted(set(versions)) for versions in self.readable.values())
