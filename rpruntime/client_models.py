"""The models of a session by name: those that this program has, and those that other programs have left in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rpruntime import records
from rpruntime.control import events as ev
from rpruntime.control.roster import OPTIMIZER
from rpruntime.failures import rebuild
from rpruntime.interrupts import uninterrupted
from rpruntime.store.relocate import extents_in
from rpruntime.wire.codec import unpack_struct
from rpruntime.wire.succession import ModelsMsg, ModelState, ReadModelsMsg

if TYPE_CHECKING:
    from rpruntime.client import Client
    from rpruntime.model import Model


class Models(Mapping[str, "Model"]):
    """One that another program has left is taken over when it is asked for.

    Attributes:
        loaded: the models that this program has loaded or taken over, by name; closed ones until nobody has them.
    """

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self.loaded: weakref.WeakValueDictionary[str, Model] = weakref.WeakValueDictionary()
        self._left: dict[str, ModelState] = {}
        """Those that other programs have left and this one has not taken over."""
        self._taken: dict[str, Model] = {}
        """Those that it has: nobody else may name them."""
        self._newest = 0
        """The highest number of a model so far."""
        self._answer: ModelsMsg | None = None
        self._has_asked = self._has_looked = False
        """Whether the optimizer was asked for the session's models, and whether they are in `_left`."""

    @property
    def _of(self) -> Client:
        client = self._client()
        assert client is not None
        return client

    def __getitem__(self, name: str) -> Model:
        loaded = self.loaded.get(name)
        if loaded is not None and not loaded.closed:
            return loaded
        try:
            self._taken[name] = found = self._take_over(name)
        except KeyError:
            known = ", ".join(self) or "none"
            raise KeyError(f"no model {name!r} in session {self._of.session.name}; there: {known}") from None
        return found

    def __iter__(self) -> Iterator[str]:
        open_ones = [name for name, model in self.loaded.items() if not model.closed]
        return iter(dict.fromkeys((*open_ones, *self._left)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"<models of {self._of.session.name}: {', '.join(self) or 'none'}>"

    def new_number(self) -> int:
        """For a model that is about to be loaded (under the client's lock)."""
        self._newest += 1
        return self._newest

    def find(self) -> None:
        """Learn what earlier controllers of the session have left; once. After an interrupt, call it again."""
        if self._has_looked:
            return
        client = self._of
        client.wait_roles()
        with uninterrupted():
            if not self._has_asked:
                client.send(OPTIMIZER, ReadModelsMsg("controller", True))
            self._has_asked = True
        client.wait(lambda: self._answer is not None, "the session's models")
        assert self._answer is not None
        if self._answer.error is not None:
            error, self._answer, self._has_asked = self._answer.error, None, False
            raise rebuild(error, 0, 0)
        with uninterrupted():
            for row in self._answer.models:
                self._newest = max(self._newest, row.model)
                if row.state is not None:
                    self._left[row.name] = unpack_struct(bytes(client.store.tensor(row.state).numpy()))
                    client.free({row.state.extent})
            self._has_looked = True

    def on_answer(self, msg: ModelsMsg) -> None:
        """The optimizer has told (under the client's lock)."""
        self._answer = msg

    def _take_over(self, name: str) -> Model:
        """Go on with a model that another program has left. Raises KeyError: there is none of this name."""
        from rpruntime.model import Model

        client, state = self._of, self._left[name]
        prepared = records.load_model(client.session.folder, state.model)
        model = Model(client, prepared, state)
        del self._left[name]
        return model

    def drop_left(self, name: str) -> bool:
        """Forget a model that another program has left; False: there is none."""
        client, state = self._of, self._left.pop(name, None)
        if state is None:
            return False
        client.free(extents_in((state.buffers, state.head)))
        client.do(ev.ModelUndoneEvent(state.model))
        records.remove(client.session.folder, state.model)
        return True
