"""A decoder trains undisturbed; then a worker is killed and another hits a device-side assert, both mid-backward.

    python scripts/check_faults.py [--shape 1.7b] [--devices cuda cuda:0]

For each choice of devices a quiet run, then a disturbed one. Prints the losses, and what each death cost beyond the
quiet run's median iteration. Exit code 1 if a loss differs from the first run by more than bf16 kernels that
add in another order can explain.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
MAX_DIFFERENCE = 5e-3


class Mortal(nn.Module):
    """A layer in whose backward the process ends in the way that a file in `folder` names; who finds it removes it."""

    def __init__(self, layer: nn.Module, folder: str, num_microbatches: int) -> None:
        super().__init__()
        self.layer = layer
        self.folder = Path(folder)
        self.num_microbatches = num_microbatches
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(self._end)
        return out

    def _end(self, gradient: torch.Tensor) -> None:
        self.calls += 1
        if self.calls % self.num_microbatches != self.num_microbatches // 2:
            return
        for how in ("kill", "assert"):
            try:
                (self.folder / how).unlink()
            except FileNotFoundError:
                continue
            if how == "kill" or not gradient.is_cuda:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]  # CUDA tells of it later


def train(options: argparse.Namespace) -> None:
    """The script that is disturbed: one JSON line an iteration."""
    import decoder

    import rpruntime as rp

    model, vocabulary = decoder.build(options.shape)
    middle = len(model) // 2
    model[middle] = Mortal(model[middle], options.folder, options.microbatches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    pipe = rp.RoundPipe(
        model,
        optimizer,
        loss_fn=decoder.loss_fn,
        num_microbatches=options.microbatches,
        plan="layers",
        seed=0,
        asynchronous=options.asynchronous,
    )
    ids = decoder.batch(vocabulary, options.batch, options.seq)
    for step in range(options.iters):
        for how, at in (("kill", options.kill), ("assert", options.fail)):
            if options.disturbed and step == at:
                (Path(options.folder) / how).touch()
        began = time.perf_counter()
        loss = float(pipe.forward_backward(ids, ids))
        info = pipe.step()
        if not options.asynchronous:
            info.result()
        print(json.dumps({"loss": loss, "seconds": time.perf_counter() - began}), flush=True)


def run(devices: str, *words: str) -> list[dict[str, float]]:
    """The rows of one run."""
    environ = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    command = [sys.executable, "-m", "launcher", "--devices", devices, "--max-restarts", "10"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command += [str(Path(__file__).resolve()), *sys.argv[1:], "--train", "--folder", folder, *words]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as popen:
            assert popen.stdout is not None
            for line in popen.stdout:  # told as they come: a run that is cut short has shown what it has
                print(f"{devices} {' '.join(words) or 'quiet'} {line}", end="", flush=True)
                rows.append(json.loads(line))
        if popen.returncode:
            raise SystemExit(f"the run ended with exit code {popen.returncode}")
        if left := os.listdir(folder):
            raise SystemExit(f"nobody died of: {', '.join(left)}")
    return rows


def compare(options: argparse.Namespace, devices: str, quiet: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A disturbed run beside the quiet one; prints what it lost, returns its rows."""
    rows = run(devices, "--disturbed")
    usual = statistics.median(row["seconds"] for row in quiet[2:])
    print(f"{devices}: undisturbed iteration {usual:.2f} s")
    for step, (a, b) in enumerate(zip(quiet, rows, strict=True)):
        print(f"  step {step:2}  loss {a['loss']:.5f} {b['loss']:.5f}  {b['seconds']:6.2f} s")
    for how, first, last in (("SIGKILL", options.kill, options.fail), ("assert", options.fail, options.iters)):
        lost = sum(row["seconds"] - usual for row in rows[first:last])
        print(f"{devices}: {how} cost {lost:.2f} s, {lost / usual:.2f} iterations")
    return rows


def main() -> int:
    """All runs, and their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7b", help="of scripts/decoder.py (default 1.7b)")
    parser.add_argument("--devices", default=["cuda"], nargs="+", help="as for rplaunch (default cuda)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iters", type=int, default=16)
    parser.add_argument("--kill", type=int, default=4, help="iteration of the SIGKILL, from 0 (4)")
    parser.add_argument(
        "--fail", type=int, default=10, help="iteration of the device-side assert; on CPU a SIGKILL (10)"
    )
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--disturbed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    first: list[dict[str, Any]] = []
    differences: list[float] = []
    for devices in options.devices:
        quiet = run(devices)
        first = first or quiet
        rows = [*quiet, *compare(options, devices, quiet)]
        differences += [abs(a["loss"] - b["loss"]) for a, b in zip([*first, *first], rows, strict=True)]
    well = all(difference <= MAX_DIFFERENCE for difference in differences)  # not so of what is no number
    print(json.dumps({"largest_difference": max(differences), "limit": MAX_DIFFERENCE, "well": well}), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
