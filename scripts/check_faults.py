"""A decoder trains undisturbed; then a worker is killed and its successor hits a device-side assert, both mid-backward.

    python scripts/check_faults.py [--shape 1.7b] [--devices cuda cuda:0]

One quiet run on the first choice of devices, then a disturbed one on each. Prints the losses, and the seconds that each
death cost beyond the median iteration of its own run. Exit code 1 if a loss differs by more than bf16 kernels that add
in another order can explain.
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
KILLED_AFTER, ASSERTED_AFTER = 3.5, 1.5
"""Iterations of the first worker's work, and then of its successor's."""


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


def run(options: argparse.Namespace, devices: str, rules: list[dict[str, object]]) -> list[dict[str, float]]:
    """The rows of one run."""
    environ = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}", "DYING": json.dumps(rules)}
    environ["RPRUNTIME_CHILD_COMMAND"] = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'dying_worker.py'}"
    command = [sys.executable, "-m", "launcher", "--devices", devices, "--max-restarts", "10"]
    command += [str(Path(__file__).resolve()), *sys.argv[1:], "--train"]
    rows = []
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        for line in popen.stdout:  # told as they come: a run that is cut short has shown what it has
            print(f"{devices} {'disturbed' if rules else 'quiet'} {line}", end="", flush=True)
            rows.append(json.loads(line))
    if popen.returncode:
        raise SystemExit(f"the run ended with exit code {popen.returncode}")
    return rows


def rules_of(options: argparse.Namespace, devices: str) -> list[dict[str, object]]:
    """When and how the first device's processes die."""
    import decoder

    layers = decoder.SHAPES[options.shape][1] + 2
    share = layers * options.microbatches / number_of(devices)  # its backward segments of an iteration
    last = "assert" if devices.startswith("cuda") else "segv"
    return [
        {"role": "worker-0", "incarnation": 1, "moment": "backward", "count": int(KILLED_AFTER * share)},
        {"role": "worker-0", "incarnation": 2, "moment": "backward", "count": int(ASSERTED_AFTER * share), "how": last},
    ]


def number_of(devices: str) -> int:
    """How many devices this choice names."""
    if devices == "cuda":
        import torch

        return torch.cuda.device_count()
    kind, _, rest = devices.partition(":")
    return int(rest) if kind == "cpu" else len(rest.split(","))


def main() -> int:
    """All runs, and their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.7b", help="of scripts/decoder.py (default 1.7b)")
    parser.add_argument("--devices", default=["cuda"], nargs="+", help="as for rplaunch (default cuda)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    quiet = run(options, options.devices[0], [])
    worst = 0.0
    for devices in options.devices:
        disturbed = run(options, devices, rules_of(options, devices))
        usual = sorted(row["seconds"] for row in disturbed)[len(disturbed) // 2]
        print(f"{devices}: median iteration {usual:.2f} s")
        for step, (a, b) in enumerate(zip(quiet, disturbed, strict=True)):
            worst = max(worst, abs(a["loss"] - b["loss"]))
            lost = b["seconds"] - usual
            print(f"  step {step:2}  loss {a['loss']:.5f} {b['loss']:.5f}  {b['seconds']:6.2f} s  {lost:+6.2f} s")
    print(json.dumps({"largest_difference": worst, "limit": MAX_DIFFERENCE}), flush=True)
    return 0 if worst <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
