"""How the loss scale of fp16 training moves: torch's rule, as arithmetic on numbers. Pure: no torch."""

from __future__ import annotations

import dataclasses
import math

from rpruntime.rounding import rounded_to_single
from rpruntime.wire.messages import ScalerState


def inverse_of(scale: float) -> float:
    """What scaled gradients are multiplied by, an fp32 value as in `torch.amp.GradScaler.unscale_`."""
    return rounded_to_single(1.0 / scale) if scale else math.inf


def moved(state: ScalerState, *, found_inf: bool, ran_under: float) -> ScalerState:
    """The state after a step whose losses were multiplied by `ran_under`.

    As `torch.amp.GradScaler.update`; an overflow under another scale than the present one (asynchronous: the step
    before has changed it already) says nothing about the present one and changes nothing.
    """
    if found_inf:
        if ran_under != state.scale:
            return state
        return dataclasses.replace(state, scale=rounded_to_single(state.scale * state.backoff_factor), growth_tracker=0)
    good = state.growth_tracker + 1
    if good != state.growth_interval:
        return dataclasses.replace(state, growth_tracker=good)
    larger = rounded_to_single(state.scale * state.growth_factor)
    return dataclasses.replace(state, scale=larger if math.isfinite(larger) else state.scale, growth_tracker=0)


def as_dict(state: ScalerState, previous_scale: float | None = None) -> dict[str, float | int]:
    """The state under torch's names; `previous_scale`, if it is another one, is what the next iteration still uses."""
    values = dataclasses.asdict(state)
    values["_growth_tracker"] = values.pop("growth_tracker")
    if previous_scale is not None and previous_scale != state.scale:
        values["_previous_scale"] = previous_scale
    return values


def from_dict(values: dict[str, float | int]) -> tuple[ScalerState, float | None]:
    """What `as_dict` was given. Raises KeyError."""
    state = ScalerState(
        float(values["scale"]),
        float(values["growth_factor"]),
        float(values["backoff_factor"]),
        int(values["growth_interval"]),
        int(values["_growth_tracker"]),
    )
    return state, values.get("_previous_scale")
