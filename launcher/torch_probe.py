"""`python -m launcher.torch_probe`: torch's build and the rate of copies, as one line of JSON on stdout.

A process of its own: a CUDA context (hundreds of MB of each GPU) goes with it, and a driver that hangs or an import
that crashes takes nobody along.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROBE_BYTES = 256 << 20
TIMEOUT_S = 120.0
_REPEATS = 4


def ask() -> dict[str, Any]:
    """Run the probe; {"error": ...} if it ends without an answer.

    Keys: version, cuda (None: a CPU build), available (devices that torch can use), error, rates: a list of {device,
    up_gb_per_s, down_gb_per_s} or {device, error}.
    """
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH", "")) if entry)
    command = [sys.executable, "-m", "launcher.torch_probe"]
    try:
        done = subprocess.run(
            command,
            cwd="/",  # a module beside the user is not one of ours
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch and its devices did not answer within {TIMEOUT_S:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()
        return {"error": f"importing torch fails: {last[-1] if last else f'exit code {done.returncode}'}"}
    return found


def probe() -> dict[str, Any]:
    """What `ask` gives, measured in this process."""
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "available": 0, "error": ""}
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
            found["available"] = torch.cuda.device_count()
        except Exception as err:
            found["error"] = str(err).splitlines()[0]
    names = [f"cuda:{index}" for index in range(found["available"])] or ["cpu"]
    found["rates"] = [_measured(name) for name in names]
    return found


def _measured(name: str) -> dict[str, Any]:
    """The rates of one device, or why there are none."""
    try:
        return {"device": name, **(_cpu_rate() if name == "cpu" else _pinned_rates(name))}
    except Exception as err:
        return {"device": name, "error": str(err).splitlines()[0]}


def _cpu_rate() -> dict[str, float]:
    import torch

    source, target = (torch.zeros(PROBE_BYTES // 4, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        target.copy_(source)
    rate = _REPEATS * source.nbytes / (time.perf_counter() - began) / 1e9
    return {"up_gb_per_s": rate, "down_gb_per_s": rate}


def _pinned_rates(name: str) -> dict[str, float]:
    """Both directions between the device and host memory that is pinned as a run pins it."""
    import torch

    from rpruntime.worker.pinning import pin_segment, unpin_segment

    host = torch.frombuffer(mmap.mmap(-1, PROBE_BYTES), dtype=torch.uint8)
    with torch.cuda.device(name):
        there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=name)
        pin_segment("of the probe", host)
        try:
            return {
                f"{direction}_gb_per_s": _timed(*ends)
                for direction, ends in {"up": (there, host), "down": (host, there)}.items()
            }
        finally:
            torch.cuda.synchronize()
            unpin_segment("of the probe", host)


def _timed(target: Any, source: Any) -> float:
    import torch

    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return float(_REPEATS * source.nbytes / (time.perf_counter() - began) / 1e9)


if __name__ == "__main__":
    print(json.dumps(probe()))
