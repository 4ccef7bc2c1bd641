"""`rp.GradScaler`: the script's view of the loss scale, which the optimizer process keeps."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from rpruntime.errors import ConfigError, RoundPipeError
from rpruntime.optimizer.scaling import as_dict, from_dict
from rpruntime.wire.messages import ScalerState

if TYPE_CHECKING:
    from rpruntime.layout import ModelLayout
    from rpruntime.model import Model


class GradScaler:
    """Loss scaling for fp16, with the arguments of `torch.amp.GradScaler`; pass it as `RoundPipe(grad_scaler=...)`.

    `pipe.forward_backward` multiplies each micro-batch's loss, `pipe.step` unscales, clips, and skips the step if a
    gradient is not finite; so of torch's methods only `get_scale`, `state_dict` and `load_state_dict` do something.

    Args:
        init_scale: of the first iteration.
        growth_factor: more than 1; multiplies the scale after `growth_interval` steps in a row that were not skipped.
        backoff_factor: less than 1; multiplies the scale after a skipped step.
        growth_interval: in steps.
        enabled: False: losses are not scaled and no step is skipped.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        init_scale: Any = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if isinstance(init_scale, str):
            raise ConfigError(f"rp.GradScaler takes no device: leave {init_scale!r} out")
        if not (math.isfinite(init_scale) and init_scale > 0):
            raise ConfigError(f"init_scale must be positive, not {init_scale!r}")
        if not growth_factor > 1:
            raise ConfigError(f"growth_factor must be more than 1, not {growth_factor!r}")
        if not 0 < backoff_factor < 1:
            raise ConfigError(f"backoff_factor must be between 0 and 1, not {backoff_factor!r}")
        if isinstance(growth_interval, bool) or not isinstance(growth_interval, int) or growth_interval < 1:
            raise ConfigError(f"growth_interval must be a positive integer, not {growth_interval!r}")
        self._enabled = bool(enabled)
        self._state = ScalerState(float(init_scale), float(growth_factor), float(backoff_factor), growth_interval, 0)
        self._previous_scale: float | None = None
        """The scale that the next iteration of an asynchronous pipe uses, if it is another one."""
        self._owner: weakref.ref[Model] | None = None

    @property
    def model(self) -> Model | None:
        """The open model that uses it."""
        model = None if self._owner is None else self._owner()
        return None if model is None or model.closed else model

    def _bind(self, model: Model) -> None:
        self._owner = weakref.ref(model)

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """The scale after every step issued so far; waits for them. `StepInfo.loss_scale` has that of one step."""
        if not self._enabled:
            return 1.0
        self._wait()
        return self._state.scale

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after every step issued so far; waits for them. Empty if not enabled.

        `torch.amp.GradScaler` can load it. An asynchronous pipe adds "_previous_scale" where the next iteration still
        uses another scale than the newest.
        """
        if not self._enabled:
            return {}
        self._wait()
        return as_dict(self._state, self._previous_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over, also one of torch's; it holds from the next iteration on.

        Raises:
            RoundPipeError: the open iteration has calls, whose losses are scaled already; or the state is empty.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RoundPipeError("the state of the GradScaler is empty: it was saved by one that was not enabled")
        missing = [key for key in as_dict(self._state) if key not in state_dict]
        if missing:
            raise RoundPipeError(f"the state of the GradScaler lacks {', '.join(missing)}")
        state, previous = from_dict(state_dict)
        model = self.model
        if model is not None:
            model.set_scaler(state, previous)
        self._state, self._previous_scale = state, previous

    def _wait(self) -> None:
        model = self.model
        if model is not None:
            model.wait_for_steps()

    def _follow(self, state: ScalerState, *, asynchronous: bool) -> None:
        """A step has been done (under the client's lock)."""
        before, self._state = self._state.scale, state
        self._previous_scale = before if asynchronous and before != state.scale else None

    def scale(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RoundPipeError("pipe.forward_backward multiplies the loss by itself: leave scaler.scale(loss) out")

    def unscale_(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RoundPipeError(
            "pipe.step unscales before it clips: use pipe.step(max_grad_norm=...) instead of scaler.unscale_(optimizer)"
        )

    def step(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RoundPipeError("call pipe.step() instead of scaler.step(optimizer)")

    def update(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RoundPipeError("pipe.step() updates the scale: leave scaler.update() out")


def choose_scaler(given: Any, layout: ModelLayout) -> GradScaler | None:
    """The scaler of a new pipe: the one that was passed, or one where gradients are float16, or none."""
    if given is None:
        trained = [param for unit in layout.units if unit.trainable for param in unit.params]
        half = any("float16" in (param.dtype, param.grad_dtype) for param in trained)
        return GradScaler() if half else None
    if not isinstance(given, GradScaler):
        kind = f"{type(given).__module__}.{type(given).__name__}"
        raise ConfigError(f"grad_scaler must be an rp.GradScaler (with the same arguments), not a {kind}")
    if given.model is not None:
        raise ConfigError(f"this GradScaler belongs to pipe {given.model.name!r} already: make one for each pipe")
    return given
