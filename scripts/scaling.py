"""The decoder on 1, 2, 4 and 8 devices: throughput of ours and of a peer, and the longest sequence that fits.

    python scripts/scaling.py --shape 1.7b 8b --counts 1 2 4 8
    python scripts/scaling.py --shape tiny --counts 1 2 --kind cpu --seq 16 --batch 4 --systems ours      a rehearsal

Three parts: "batch" (64 sequences a device, 256 at most, M = 2N), "single" (one sequence a micro-batch, batch = M = 8N)
and "sequence" (the longest one under --limit GB a device, with layer recomputation and a head that never holds all
logits). `efficiency` is tokens/s over N times those of one device. CUDA devices are chosen by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import bench
import decoder

LENGTHS = (16384, 24576, 32768, 49152, 65536, 73728, 98304, 131072)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["1.7b"], choices=list(decoder.SHAPES))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of devices (1 2 4 8)")
    parser.add_argument("--kind", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="sequences a device, up to four times as many (64)")
    parser.add_argument("--systems", default="ours,ours-sync,peer", help="comma-separated")
    parser.add_argument("--parts", nargs="+", default=["batch", "single", "sequence"])
    parser.add_argument("--limit", type=float, default=24, help="GB a device for the longest sequence (24)")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens, ascending")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each row (300)")
    options = parser.parse_args()
    for shape in options.shape:
        for part in options.parts:
            if part == "sequence":
                longest(options, shape)
            else:
                throughput(options, shape, part)
    return 0


def throughput(options: argparse.Namespace, shape: str, part: str) -> None:
    """One table: a row for each system and number of devices, as they come."""
    print(f"{shape}, {'M = 2N' if part == 'batch' else 'one sequence a micro-batch'}, sequence {options.seq}")
    print(
        f"  {'system':10} {'devices':>7} {'batch':>6} {'M':>4} {'tokens/s':>9} {'efficiency':>10} {'optimizer s':>11}",
        flush=True,
    )
    for system in options.systems.split(","):
        alone = None
        for count in options.counts:
            batch, m = (options.batch * min(4, count), 2 * count) if part == "batch" else (8 * count, 8 * count)
            row = run(options, shape, system, count, ["--batch", batch, "--microbatches", m, "--seq", options.seq])
            if row is None:
                continue
            alone = alone or row["tokens_s"] / count
            efficiency = row["tokens_s"] / count / alone
            print(
                f"  {system:10} {count:7} {batch:6} {m:4} {row['tokens_s']:9,.0f} {efficiency:10.3f} "
                f"{row.get('optimizer_s', 0):11.2f}",
                flush=True,
            )


def longest(options: argparse.Namespace, shape: str) -> None:
    """The longest of `--lengths` that each number of devices trains with."""
    for count in options.counts:
        fits = 0
        for length in options.lengths:
            words = ["--batch", 2 * count, "--microbatches", 2 * count, "--seq", length, "--chunked-head"]
            words += ["--recompute", "layer", "--plan", "layers"]
            if run(options, shape, "ours", count, words, ["--device-memory", str(options.limit * 1e9 / 2**30)]) is None:
                break
            fits = length
        print(f"{shape}, {count} devices: {fits} tokens fit {options.limit} GB a device", flush=True)


def run(
    options: argparse.Namespace, shape: str, system: str, count: int, words: list[Any], flags: list[str] | None = None
) -> dict[str, Any] | None:
    """One row on the first `count` devices."""
    devices = f"cpu:{count}" if options.kind == "cpu" else "cuda"
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))} if options.kind == "cuda" else None
    words = ["--shape", shape, "--warmup", options.warmup, "--iters", options.iters, *words]
    flags = ["--devices", devices, *(flags or [])]
    return bench.run_row(system, words, flags, timeout_s=options.timeout, variables=variables)


if __name__ == "__main__":
    sys.exit(main())
