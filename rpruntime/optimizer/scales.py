"""The loss scale of a model: where it stands, and what it was for the versions that may still be read."""

from __future__ import annotations

from typing import Any

from rpruntime.optimizer.scaling import as_dict, from_dict, moved
from rpruntime.wire.messages import ScalerState, SetScalerMsg


class Scales:
    """They belong to versions: an iteration's losses are multiplied by the scale of the version that it reads.

    Attributes:
        state: the gradient scaler's; None: losses are not scaled.
    """

    def __init__(self, state: ScalerState | None) -> None:
        self.state = state
        self._scales = {} if state is None else {0: state.scale}
        """Version -> the scale after that many steps."""

    def of(self, version: int) -> float:
        """That the losses of iterations which read this version are multiplied by, where losses are scaled."""
        return self._scales[version]

    def announced(self, version: int) -> float:
        """What the readers of a version are told: 1 where losses are not scaled."""
        return self._scales.get(version, 1.0)

    def set(self, msg: SetScalerMsg) -> None:
        """The script has set another state."""
        self.state = msg.state
        self._scales.update(msg.scales)

    def move(self, step: int, version_read: int, *, found_inf: bool) -> None:
        """The gradients of a step, which had read this version, are measured; no unit has been stepped yet."""
        assert self.state is not None
        self.state = moved(self.state, found_inf=found_inf, ran_under=self._scales[version_read])
        self._scales[step + 1] = self.state.scale  # before any unit of this version is published

    def forget_before(self, version: int) -> None:
        """Older versions are not read any more."""
        self._scales = {known: scale for known, scale in self._scales.items() if known >= version}

    # --- for checkpoints and other controllers

    def saved(self, *, asynchronous: bool) -> dict[str, Any] | None:
        """The gradient scaler as the next iteration finds it; None: there is none."""
        if self.state is None:
            return None
        # steps since the load at least, so the version before the newest one may be missing
        before = sorted(self._scales)[-2:][0] if asynchronous else max(self._scales)
        return as_dict(self.state, self._scales[before])

    def restore(self, saved: dict[str, Any] | None, version: int) -> None:
        """Take over what `saved` gave, for `version` and the one before; None: it goes on where it is."""
        if self.state is not None:
            self.state, previous = from_dict(saved or as_dict(self.state))
            self._scales[version] = self.state.scale
            self._scales[version - 1] = self.state.scale if previous is None else previous

    def told(self, version: int) -> tuple[tuple[int, float], ...]:
        """(version, scale) of this version, the newest one, and of the one before, as far as they are known."""
        default = {} if self.state is None else {version: self.state.scale}
        return tuple(sorted({**default, **self._since(version - 1)}.items()))

    def left_at(self, version: int) -> Scales:
        """What the next controller finds, with this version as the newest one."""
        left = Scales(self.state)
        left._scales = self._since(version - 1)
        return left

    def _since(self, version: int) -> dict[int, float]:
        return {known: scale for known, scale in self._scales.items() if known >= version}
