"""How fast the optimizer process adds gradients, steps and writes weights, without a session and on private memory.

    python scripts/bench_optimizer.py --params 2e9 --threads 28
    python scripts/bench_optimizer.py --params 2e9 --threads 28 --piece 32768 65536 131072

One JSON line a variant: seconds of the best and the median iteration, G parameters/s, and GB/s by the bytes it has to
move. "whole" is `optimizer.step()` over whole units, as other optimizers are stepped; "pieces" are as `pieces.py` cuts.
Both without "take", by which gradients come out of a worker's memory.
Layers are those of a decoder (`--width`), bf16 with bf16 gradients and AdamW. 16 bytes a parameter are needed, 18 for
"add".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rpruntime.optimizer import pieces, units
from rpruntime.optimizer.norms import Norms, in_windows
from rpruntime.store.arena import Arena, Store
from rpruntime.store.layout import gradient_layout, packed
from rpruntime.store.segments import PrivateSegments
from rpruntime.wire.messages import ParamSpec, SlabPart, UnitSpec

MOVED = {"pieces": 28, "whole": 40, "take": 4, "add": 10, "norm": 14}
"""Bytes a parameter: what each variant reads and writes in memory."""


def decoder_unit(index: int, width: int) -> UnitSpec:
    """One layer: attention with a quarter of the heads for keys and values, a gated MLP, two norms."""
    inner = 7 * width // 2
    shapes = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    shapes += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    offsets, nbytes = packed(shapes, ["bfloat16"] * len(shapes))
    params = tuple(
        ParamSpec(f"layer{index}.{number}", offset, shape, "bfloat16", "bfloat16", 0)
        for number, (offset, shape) in enumerate(zip(offsets, shapes, strict=True))
    )
    return UnitSpec(index, True, (index,), nbytes, params)


@torch.no_grad()
def repeat(std: float, into: torch.Tensor) -> None:
    """Fill with one random row again and again: drawing 2 G normal numbers takes minutes."""
    row = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * std).to(into.dtype)
    for piece in into.view(-1).split(row.numel()):
        piece.copy_(row[: piece.numel()])


class Bench:
    """Units with gradients, stepped as the optimizer process does."""

    def __init__(self, num_params: float, width: int) -> None:
        self._segments = PrivateSegments()
        self.arena = Arena("bench", self._segments, Store(self._segments))
        self.scratch = pieces.Scratch()
        spec = decoder_unit(0, width)
        each = sum(torch.Size(param.shape).numel() for param in spec.params)
        count = max(1, round(num_params / each))
        self.num_params = count * each
        self.units = [units.Unit(decoder_unit(i, width), self.arena, self.scratch) for i in range(count)]
        whole = torch.optim.AdamW([p for unit in self.units for p in unit.params], lr=1e-4)
        self.parts: list[SlabPart] = []
        for unit in self.units:
            for param in unit.params:
                repeat(0.02, param)
            unit.adopt_optimizer(whole)
            unit.place_state()
            slab = self.arena.allocate(gradient_layout(unit.spec)[1])
            repeat(1e-3, self.arena.store.bytes_of(slab).view(torch.bfloat16))
            self.parts.append(SlabPart(unit.spec.index, slab, (True,) * len(unit.params)))
        self.groups: tuple[dict[str, Any], ...] = ({"lr": 1e-4},)

    def forget(self) -> None:
        """No unit has a gradient any more."""
        for unit in self.units:
            unit.drop_sum(0)

    def take(self) -> None:
        """G_cp of an iteration with one call: every unit's gradients are copied."""
        self.forget()
        self.add()

    def step(self) -> float:
        """Step and P_cp of every unit; returns the seconds of taking the gradients, which are not part of it."""
        taking = 0.0
        for unit, part in zip(self.units, self.parts, strict=True):
            began = time.perf_counter()
            unit.add(0, part)
            taking += time.perf_counter() - began
            extent = unit.step(0, self.groups, 1.0, 1.0)
            assert extent is not None
            self.arena.free(extent)
        return taking

    def add(self) -> None:
        """G_cp: another slab of every unit is taken, and added to what there is."""
        for unit, part in zip(self.units, self.parts, strict=True):
            unit.add(0, part)

    def norm(self) -> None:
        """The global norm of what `add` has taken, for clipping."""
        with Norms() as pool:
            for several in in_windows(self.units, [unit.wide_bytes for unit in self.units]):
                rooms = self.scratch.take(sum(unit.wide_bytes for unit in several))
                cut = rooms.split([unit.wide_bytes for unit in several])
                pool.measure(g for unit, room in zip(several, cut, strict=True) for g in unit.gradients(0, 1.0, room))

    def close(self) -> None:
        """Give the memory back."""
        for unit in self.units:
            unit.free()
        self._segments.close()


def timed(work: Callable[[], float | None], iterations: int) -> list[float]:
    """Seconds of each iteration, less those that `work` returns, without the first one, in which memory is touched."""
    seconds = []
    for _ in range(iterations + 1):
        began = time.perf_counter()
        other = work() or 0.0
        seconds.append(time.perf_counter() - began - other)
    return seconds[1:]


def main() -> None:
    """Run the variants that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=2e9, help="about how many parameters")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bind", action="store_true", help="keep to the last --threads of the cores")
    parser.add_argument("--piece", type=int, nargs="+", default=[pieces.ELEMENTS_A_THREAD], help="elements a thread")
    parser.add_argument(
        "--variants", nargs="+", choices=sorted(MOVED), default=["pieces", "whole", "take", "norm", "add"]
    )
    options = parser.parse_args()
    if options.bind:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    torch.set_num_threads(options.threads)
    for piece in options.piece:
        pieces.ELEMENTS_A_THREAD = piece
        bench = Bench(options.params, options.width)
        for variant in options.variants:
            if variant == "whole":
                units.is_fused = lambda optimizer: False
            works = {"take": bench.take, "add": bench.add, "norm": bench.norm}
            bench.forget()
            if variant in ("add", "norm"):
                bench.add()
            seconds = timed(works.get(variant, bench.step), options.iters)
            units.is_fused = pieces.is_fused
            best = min(seconds)
            row = {
                "variant": variant, "parameters": bench.num_params, "threads": options.threads, "bind": options.bind,
                "piece": piece, "seconds": round(best, 4), "median_s": round(statistics.median(seconds), 4),
                "G_params_per_s": round(bench.num_params / best / 1e9, 3),
                "GB_per_s": round(bench.num_params * MOVED[variant] / best / 1e9, 1),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
        bench.close()


if __name__ == "__main__":
    main()
