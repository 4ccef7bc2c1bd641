"""Randomness as a function of place, never of what a device ran before."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def layer_seed(seed: int, iteration: int, micro_batch: int, layer: int) -> int:
    """The seed set (`torch.manual_seed`) before a layer's forward and again before its recompute.

    Args:
        seed: of the pipe (`torch.initial_seed()` by default).
        iteration: counted from 0; one more with every `step()`.
        micro_batch: counted through the iteration, over all its calls, from 0.
        layer: position in the `nn.Sequential`.

    Returns:
        An integer in [0, 2**63), well mixed: neighbouring arguments give unrelated seeds (splitmix64).
    """
    state = seed & _MASK
    for part in (iteration, micro_batch, layer):
        state = _mix(state ^ _mix(part + 0x9E3779B97F4A7C15))
    return state >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
