"""The models of a session: how they come and go."""

from __future__ import annotations

from rpruntime.optimizer.events import BuildModel, FillModel, ForgetModel, ModelFilledEvent
from rpruntime.optimizer.model import Model
from rpruntime.optimizer.outbox import Outbox
from rpruntime.wire.messages import ModelFilledMsg, ModelSpec, UnloadModelMsg


class Models:
    """Those that are loaded or being loaded, by number."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._models: dict[int, Model] = {}

    def __getitem__(self, number: int) -> Model:
        return self._models[number]

    def __contains__(self, number: int) -> bool:
        return number in self._models

    def get(self, number: int) -> Model | None:
        """None: it has gone; what was under way of it may still end."""
        return self._models.get(number)

    def all(self) -> list[Model]:
        """In the order in which they came."""
        return list(self._models.values())

    def on_load(self, msg: ModelSpec) -> None:
        """A controller loads a model."""
        self._models[msg.model] = Model(msg, self._out)
        self._out.add(BuildModel(msg))

    def on_written(self, msg: ModelFilledMsg) -> None:
        """The controller has written the initial weights."""
        self._out.add(FillModel(msg.model))

    def on_filled(self, event: ModelFilledEvent) -> None:
        """They are in place: version 0."""
        model = self._models[event.model]
        model.master = dict(enumerate(event.master))
        model.publish(0, model.master.items())

    def on_unload(self, msg: UnloadModelMsg) -> None:
        """It is closed, or could not be loaded."""
        self.forget(msg.model)

    def forget(self, number: int) -> None:
        """Give its memory back."""
        self._models.pop(number, None)
        self._out.add(ForgetModel(number))

    def leave_behind(self) -> None:
        """Forget the models from which nobody could go on; the others are as the next controller finds them."""
        for number, model in list(self._models.items()):
            if model.torn or model.failed or model.note is None:
                self.forget(number)
            else:
                self._models[number] = model.left_behind()
