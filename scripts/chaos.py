"""Trains while killing workers at random, then trains undisturbed, and compares every loss and weight.

    python scripts/chaos.py                              20 kills on cpu:3
    python scripts/chaos.py --kills 200 --devices cpu:2 --asynchronous
    python scripts/chaos.py --devices cuda --kills 5

The last line says how many kills the run survived; exit code 1 if the numbers differ or the run ended early.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_KILL_S, SILENCE_S = 120.0, 120.0


def train(stop: Path, num_steps: int, asynchronous: bool) -> None:
    """The script under fire: trains until `stop` exists, or `num_steps` steps (-1: no limit)."""
    import torch
    from torch import nn

    import rpruntime as rp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    pipe = rp.RoundPipe(
        model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=6, asynchronous=asynchronous, seed=1
    )
    data = torch.Generator().manual_seed(2)
    step = 0
    while step != num_steps and not stop.exists():
        x, y = torch.randn(24, 32, generator=data), torch.randn(24, 4, generator=data)
        loss = pipe.forward_backward(x, y)
        pipe.step()
        print(f"{step} {float(loss)!r}", flush=True)
        step += 1
    pipe.synchronize()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)


def command(options: argparse.Namespace, devices: str, stop: Path, num_steps: int) -> list[str]:
    limits = ["--max-restarts", "100000", "--max-task-failures", "100000", "-q"]
    words = [sys.executable, "-m", "launcher", "--devices", devices, *limits, str(Path(__file__).resolve())]
    words += ["--train", str(stop), str(num_steps)]
    return [*words, *(["--asynchronous"] if options.asynchronous else [])]


def workers_of(launcher: int) -> list[int]:
    """The workers' pids: the launcher's children that have the name of one and have not been killed yet."""
    found = []
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        if name.startswith("rp:worker-") and rest.split()[0] not in "ZX":
            found.append(int(pid))
    return found


def disturb(options: argparse.Namespace, stop: Path, output: Path) -> tuple[int, int]:
    """Run the script and kill its workers; returns (kills, exit code)."""
    rng = random.Random(options.seed)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    kills, told = 0, time.monotonic()
    with output.open("wb") as out:
        popen = subprocess.Popen(command(options, options.devices, stop, -1), stdout=out, env=environ)
        try:
            wait_for(lambda: output.stat().st_size > 0 or popen.poll() is not None, FIRST_KILL_S, "the first step")
            while kills < options.kills and popen.poll() is None:
                time.sleep(rng.expovariate(1 / options.interval))
                alive = workers_of(popen.pid) if popen.poll() is None else []
                if alive:
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    kills += 1
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    print(f"chaos: {kills} of {options.kills} kills, {count_steps(output)} steps", file=sys.stderr)
            seen = count_steps(output)
            wait_for(lambda: count_steps(output) > seen + 2 or popen.poll() is not None, SILENCE_S, "two more steps")
            stop.touch()
            return kills, popen.wait(SILENCE_S)
        finally:
            if popen.poll() is None:
                popen.send_signal(signal.SIGTERM)
                popen.wait(30)


def count_steps(output: Path) -> int:
    return output.read_bytes().count(b"\n")


def wait_for(ready: object, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(f"chaos: {what} did not come in {timeout_s:.0f} s")
        time.sleep(0.05)


def main() -> int:
    """Disturb, repeat undisturbed, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:3", help="as for rplaunch (default cpu:3)")
    parser.add_argument("--kills", type=int, default=20, help="how many workers to kill (default 20)")
    parser.add_argument("--interval", type=float, default=2.0, help="mean seconds between kills (default 2)")
    parser.add_argument("--asynchronous", action="store_true", help="train asynchronously")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default 0)")
    parser.add_argument("--train", nargs=2, metavar=("STOP", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Path(options.train[0]), int(options.train[1]), options.asynchronous)
        return 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        began = time.monotonic()
        kills, code = disturb(options, Path(folder) / "stop", Path(folder) / "out")
        lines = (Path(folder) / "out").read_text().splitlines()
        steps = len(lines) - 1
        if code != 0 or not lines or not lines[-1].startswith("weights"):
            print(f"lost: the run ended with exit code {code} after {kills} kills and {len(lines)} steps")
            return 1
        seconds = time.monotonic() - began
        quiet = command(options, "inline", Path(folder) / "never", steps)
        expected = subprocess.run(quiet, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
        same = expected.stdout.splitlines() == lines
    print(
        json.dumps(
            {
                "survived": kills,
                "lost": 0 if same else kills,
                "steps": steps,
                "seconds": round(seconds, 1),
                "same": same,
            }
        )
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
