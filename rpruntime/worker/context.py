"""What the layers run under: the script's settings (autocast, default dtype, determinism, TF32) and the seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


def capture() -> dict[str, Any]:
    """The caller's settings, for `CallMsg.context`."""
    return {
        "autocast": tuple(
            (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
    }


@contextlib.contextmanager
def applied(settings: dict[str, Any]) -> Iterator[None]:
    """Run a block under captured settings; what was set before is put back."""
    before = capture()
    with contextlib.ExitStack() as stack:
        if any(before[name] != settings[name] for name in before if name in settings):
            stack.callback(_set, before)
            _set(settings)
        stack.enter_context(torch.enable_grad())
        wanted = settings.get("autocast", ())
        for device, dtype, cache in wanted:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=cache))
        for device in {entry[0] for entry in before["autocast"]} - {entry[0] for entry in wanted}:
            stack.enter_context(torch.autocast(device, enabled=False))
        if before["autocast"]:  # inline, inside the script's block: casts of other weights must not be found
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """What `torch.manual_seed` does to the CPU's generator and to this device's, without looking for other devices (it
    takes 75 us, more than a launch-bound layer can spare)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def _set(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["deterministic_warn_only"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    cudnn = torch.backends.cudnn
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = settings["cudnn"]
