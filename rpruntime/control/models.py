"""The models of a session: how they come, where an older controller left them, how they go."""

from __future__ import annotations

from collections.abc import Iterator

from rpruntime.control.events import (
    KeepOpenEvent,
    ModelAddedEvent,
    ModelFoundEvent,
    ModelLoadingEvent,
    ModelUndoneEvent,
)
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.model import Model
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER, Roster
from rpruntime.wire.messages import LoadModelMsg, UnloadModelMsg, WeightsReadyMsg
from rpruntime.wire.succession import KeepOpenMsg, NoteModelMsg, head_place


class Models:
    """Those that are loaded, by number, and what a worker that starts late is told of them."""

    def __init__(self, roster: Roster, lifetimes: Lifetimes, out: Outbox) -> None:
        self._roster = roster
        self._lifetimes = lifetimes
        self._out = out
        self._models: dict[int, Model] = {}
        self._loads: dict[int, LoadModelMsg] = {}
        """Of those that are loaded or being loaded."""

    def __getitem__(self, number: int) -> Model:
        return self._models[number]

    def __contains__(self, number: int) -> bool:
        return number in self._models

    def __iter__(self) -> Iterator[int]:
        return iter(self._models)

    def on_loading(self, event: ModelLoadingEvent) -> None:
        """All roles load it."""
        self._loads[event.load.model] = event.load
        self._out.send_all(event.load)

    def on_found(self, event: ModelFoundEvent) -> None:
        """The optimizer has it already."""
        self._loads[event.load.model] = event.load
        self._out.send_workers(event.load)

    def on_undone(self, event: ModelUndoneEvent) -> None:
        """All roles forget it."""
        self._loads.pop(event.model, None)
        self._out.send_all(UnloadModelMsg(event.model))

    def on_added(self, event: ModelAddedEvent) -> None:
        """All roles have it."""
        number, found = event.model, event.found
        model = self._models[number] = Model(event, self._lifetimes, self._out)
        if found is not None:
            model.go_on_from(found)
        model.publish(WeightsReadyMsg(number, model.iteration, tuple(enumerate(event.master)), event.loss_scale))
        model.start_from(model.head, event.buffers)
        if found is None:
            self._out.send(OPTIMIZER, NoteModelMsg(number, 0, 0, None, event.buffers))
        elif found.num_microbatches:
            model.begin_with(head_place(number), found.head)
        for role in self._roster.living:
            if found is not None or role in self._roster.replaced():  # it may have started after they were published
                model.versions.send(role)

    def on_keep_open(self, event: KeepOpenEvent) -> None:
        """The optimizer keeps what the open iteration has summed, and the buffers after it."""
        model = self._models[event.model]
        assert not model.unfinished_steps()
        buffers = tuple(sorted(model.buffers(model.head).items()))
        msg = KeepOpenMsg(event.model, tuple(model.open.wanted), model.open.num_microbatches, buffers)
        self._out.send(OPTIMIZER, msg)

    def on_weights(self, msg: WeightsReadyMsg) -> None:
        """The optimizer has written weights, maybe of a model that is gone."""
        if msg.model in self._models:
            self._models[msg.model].publish(msg)

    def tell(self, role: str) -> None:
        """All that a worker has to know when it joins, besides its slots."""
        for load in self._loads.values():
            self._out.send(role, load)
        for model in self._models.values():
            model.versions.send(role)
        for key in self._lifetimes.live_keys():
            announced = self._lifetimes.announced(key)
            if key[0] == "buffer" and announced is not None:
                self._out.send(role, announced[0])

    def remove(self, number: int) -> None:
        """Its calls are gone: all roles forget it."""
        model = self._models.pop(number)
        model.forget()
        self.on_undone(ModelUndoneEvent(number))
        model.versions.forget()
