"""The script's parameters and buffers while its model is loaded: views and copies of what the session has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rpruntime.buffers import buffer_places
from rpruntime.errors import ConfigError
from rpruntime.interrupts import uninterrupted
from rpruntime.loading import point_parameters
from rpruntime.store.handle import Extent

if TYPE_CHECKING:
    from rpruntime.model import Model


class ScriptWeights:
    """Of one model; `master`: where its units lie at first.

    Attributes:
        trained: ids of the parameters that are trained.
        stale: a step has been issued since the parameters were made the newest weights.
    """

    def __init__(self, model: Model, master: dict[int, Extent]) -> None:
        self._model = model
        self._layout = layout = model.layout
        self.stale = False
        self._point(master)
        self.trained = {
            id(parameter) for (unit, _), parameter in layout.parameters.items() if layout.units[unit].trainable
        }

    def _point(self, weights: dict[int, Extent]) -> None:
        with uninterrupted():
            point_parameters(self._model.client, self._layout, weights)
            self._written = {id(p): (p._version, p.data_ptr()) for p in self._layout.parameters.values()}

    def fetch(self) -> None:
        """Make parameters and buffers the newest; every step issued is done."""
        client, number = self._model.client, self._model.number
        with client.lock:
            weights = client.machine.newest_weights(number)
        self._point(weights)
        self.stale = False
        with client.lock:
            found = client.machine.newest_buffers(number)
        for position, payload in found.items():
            values = self._model.decode(payload)
            for name, owner, local in buffer_places(self._layout.layers[position]):
                old, new = owner._buffers[local], values[name]
                if (
                    old is not None
                    and new is not None
                    and old.shape == new.shape
                    and old.dtype == new.dtype
                    and old.is_contiguous()
                ):
                    with torch.no_grad():
                        old.copy_(new)
                else:
                    owner._buffers[local] = new

    def check(self) -> None:
        """Raises ConfigError, once, for a parameter that the script has written to or moved elsewhere."""
        for (unit, index), parameter in self._layout.parameters.items():
            state = parameter._version, parameter.data_ptr()
            if state != self._written[id(parameter)]:
                self._written[id(parameter)] = state
                raise ConfigError(
                    f"{self._layout.units[unit].params[index].name} was written to, which has no effect on the weights "
                    "that are trained: change the model before RoundPipe wraps it"
                )

    def shown(self, *, everything: bool) -> dict[int, Extent]:
        """Where the weights lie that the parameters show: all of them, or the frozen ones alone."""
        client = self._model.client
        with client.lock:
            newest = client.machine.newest_weights(self._model.number)
        units = self._layout.units
        return {unit: extent for unit, extent in newest.items() if everything or not units[unit].trainable}
