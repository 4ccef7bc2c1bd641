"""The buffers with which a model's iterations start: told by the workers, kept in the optimizer's memory."""

from __future__ import annotations

from rpruntime.optimizer.events import KeepBuffers, TakeHead
from rpruntime.optimizer.outbox import Outbox
from rpruntime.store.handle import Payload
from rpruntime.wire.messages import DataReadyMsg, ModelSpec
from rpruntime.wire.succession import head_place

Place = tuple[int, int]
"""(call, micro-batch) after which buffers are meant."""


class StartBuffers:
    """Those after the last micro-batch of each iteration, as a step keeps them for whoever goes on."""

    def __init__(self, spec: ModelSpec, out: Outbox, kept_from: Place = (0, 0)) -> None:
        self._number = spec.model
        self._positions = [position for position, layer in enumerate(spec.layers) if layer.buffers]
        self._out = out
        self._told: dict[Place, dict[int, Payload]] = {}
        """By position, what workers have told."""
        self._kept_from = kept_from
        """Whose buffers are kept, or kept as those after the open iteration's calls."""

    def add(self, msg: DataReadyMsg) -> None:
        """The buffers after a call's last micro-batch, from whoever ran it; or data that is nothing to this process."""
        if msg.key[0] == "buffer" and msg.key[1] > self._kept_from[0]:
            _, call, microbatch, position = msg.key
            self._told.setdefault((call, microbatch), {}).setdefault(position, msg.payload)

    def keep(self, place: Place) -> bool:
        """Keep the buffers of a place, with which the next iteration starts; False: some have not come."""
        if not self._positions or place == self._kept_from:
            return True
        if place == head_place(self._number):
            self._out.add(TakeHead(self._number))
            self._kept_from = place
            return True
        found = self._told.get(place, {})
        if any(position not in found for position in self._positions):
            return False
        self._out.add(KeepBuffers(self._number, tuple((position, found[position]) for position in self._positions)))
        self._kept_from = place
        self._told = {known: buffers for known, buffers in self._told.items() if known[0] > place[0]}
        return True

    def cancel(self, first: int, last: int) -> None:
        """What calls `first` to `last` have left means nothing."""
        self._told = {place: buffers for place, buffers in self._told.items() if not first <= place[0] <= last}
