"""A decoder trains undisturbed; then a worker is killed and its successor hits a device-side assert, both mid-backward.

    python scripts/check_faults.py [--shape 1.7b] [--devices cuda]

Prints a table of losses and of the seconds that each death cost beyond an undisturbed iteration. Exit code 1 if a loss
differs by more than bf16 kernels that add in another order can explain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_DIFFERENCE = 5e-3
KILLED_AT, ASSERTED_AT = 3, 6
"""Iterations, from 0."""


def train(options: argparse.Namespace) -> None:
    """The script that is disturbed: one JSON line an iteration."""
    import decoder
    import torch

    import rpruntime as rp

    model, vocabulary = decoder.build(options.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    pipe = rp.RoundPipe(
        model, optimizer, loss_fn=decoder.loss_fn, num_microbatches=options.microbatches, plan="layers", seed=0
    )
    ids = decoder.batch(vocabulary, options.batch, options.seq)
    for _ in range(options.iters):
        began = time.perf_counter()
        loss = float(pipe.forward_backward(ids, ids))
        pipe.step().result()
        print(json.dumps({"loss": loss, "seconds": time.perf_counter() - began}), flush=True)


def run(options: argparse.Namespace, rules: list[dict[str, object]]) -> list[dict[str, float]]:
    """The rows of one run."""
    environ = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}", "DYING": json.dumps(rules)}
    environ["RPRUNTIME_CHILD_COMMAND"] = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'dying_worker.py'}"
    command = [sys.executable, "-m", "launcher", "--devices", options.devices, "--max-restarts", "10"]
    command += [str(Path(__file__).resolve()), *sys.argv[1:], "--train"]
    rows = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        for line in popen.stdout:  # told as they come: a run that is cut short has shown what it has
            print(f"{'disturbed' if rules else 'quiet'} {line}", end="", flush=True)
            rows.append(json.loads(line))
    if popen.returncode:
        raise SystemExit(f"the run ended with exit code {popen.returncode}")
    return rows


def main() -> int:
    """Both runs, and their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7b", help="of scripts/decoder.py (default 1.7b)")
    parser.add_argument("--devices", default="cuda", help="as for rplaunch (default cuda)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    import decoder

    layers = decoder.SHAPES[options.shape][1] + 2
    share = layers * options.microbatches  # backward segments of an iteration, on all workers together
    rules = [
        {"role": "worker-0", "incarnation": 1, "moment": "backward", "count": KILLED_AT * share + share // 2},
        {
            "role": "worker-0",
            "incarnation": 2,
            "moment": "backward",
            "count": (ASSERTED_AT - KILLED_AT) * share,
            "how": "assert" if options.devices.startswith("cuda") else "segv",
        },
    ]
    quiet, disturbed = run(options, []), run(options, rules)
    usual = sorted(row["seconds"] for row in quiet)[len(quiet) // 2]
    worst = 0.0
    for step, (a, b) in enumerate(zip(quiet, disturbed, strict=True)):
        worst = max(worst, abs(a["loss"] - b["loss"]))
        lost = b["seconds"] - usual
        print(f"step {step}  loss {a['loss']:.5f} {b['loss']:.5f}  {b['seconds']:6.2f} s  {lost:+6.2f} s")
    print(json.dumps({"iteration_s": round(usual, 2), "largest_difference": worst, "limit": MAX_DIFFERENCE}))
    return 0 if worst <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
