"""The bubbles of figure 19 of the RoundPipe paper beside those of our simulator, and the same on measured H200 times.

    python scripts/figure19.py                              # print both tables
    python scripts/figure19.py --write docs/scheduling.md   # put them between the page's markers

The paper gives layer times, hops and the number of RoundPipe stages; how its other schedules cut layers is not
published. `paper_stages` is the rule that reproduces its numbers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rpruntime.schedule import ExecutionPlan, Simulation, bound_plan, partition, simulate
from rpruntime.schedule.bound import mirrored_plan

DATA = Path(__file__).resolve().parent / "data"
NAMES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved-1f1b": "interleaved", "looped-bfs": "looped_bfs"}
"""The paper's schedules and ours."""
DEVICES, MICROBATCHES = 8, 16
H200_LINK_GB_PER_S = 55.0
"""Host link of each GPU; a hop is a boundary's activations down and up again."""


@dataclass(frozen=True)
class Model:
    """Layer times as the simulator takes them: backward includes the recomputation; milliseconds."""

    name: str
    forward_ms: list[float]
    backward_ms: list[float]
    hop_ms: float

    def simulate(self, plan: ExecutionPlan, schedule: str = "roundpipe", **settings: Any) -> Simulation:
        return simulate(
            plan,
            self.forward_ms,
            self.backward_ms,
            num_devices=DEVICES,
            num_microbatches=MICROBATCHES,
            schedule=schedule,
            hop_ms=self.hop_ms,
            **settings,
        )

    def partition(self, asynchronous: bool = False) -> ExecutionPlan:
        return partition(
            self.forward_ms,
            self.backward_ms,
            num_devices=DEVICES,
            num_microbatches=MICROBATCHES,
            hop_ms=self.hop_ms,
            asynchronous=asynchronous,
        )

    def steady_bubble(self, plan: ExecutionPlan) -> float:
        """Bubble of asynchronous iterations once the pipeline is full: of the last 16 of 24."""
        short = self.simulate(plan, asynchronous=True, iterations=8)
        long = self.simulate(plan, asynchronous=True, iterations=24)
        return 1 - (long.busy_ms - short.busy_ms) / DEVICES / (long.makespan_ms - short.makespan_ms)

    def chain_bubble(self) -> float:
        """The least bubble of one iteration under any schedule that runs each layer of a micro-batch on one device.

        The first micro-batch goes through all layers, and the others follow through the slowest layer one by one.
        """
        slowest = max(self.backward_ms)
        chain = sum(self.forward_ms[:-1]) + sum(self.backward_ms)
        work = MICROBATCHES * chain
        return max(0.0, 1 - work / DEVICES / (chain + (MICROBATCHES - 1) * slowest))


def paper() -> dict[str, Any]:
    """The paper's inputs and results."""
    found: dict[str, Any] = json.loads((DATA / "paper_figure19.json").read_text())
    return found


def paper_model(name: str, *, embedding: bool) -> Model:
    """A model of figure 19; the bound schedules' stages also hold the embedding, which takes no time."""
    given = paper()["inputs"][name]
    first = [0.0] if embedding else []
    layer_ms = given["fwd_ms"] + given["bwd_ms"]
    head_ms = given["head_fwd_ms"] + given["head_bwd_ms"]
    forward = [*first, *[given["fwd_ms"]] * given["layers"], given["head_fwd_ms"]]
    return Model(name, forward, [*first, *[layer_ms] * given["layers"], head_ms], given["hop_ms"])


def paper_stages(model: Model, num_stages: int) -> ExecutionPlan:
    """The paper's cut for bound schedules, found by trying: it reproduces all its totals.

    The head counts as as many decoder layers as its time is worth, rounded, at least one. Layers so counted are cut
    evenly, stages with fewer first; the embedding comes on top of the first stage, which may hold nothing else.
    """
    num_layers = len(model.forward_ms) - 2
    head = max(1, round(model.backward_ms[-1] / (model.forward_ms[1] + model.backward_ms[1])))
    size, longer = divmod(num_layers + head, num_stages)
    sizes = [size + (stage >= num_stages - longer) for stage in range(num_stages)]
    sizes[0] += 1
    sizes[-1] += 1 - head
    stages, start = [], 0
    for count in sizes:
        stages.append(range(start, start + count))
        start += count
    return mirrored_plan(stages)


def paper_plan(name: str) -> ExecutionPlan:
    """The paper's numbers of RoundPipe stages, cut evenly, stages with fewer layers first; the head alone is fused."""
    num_layers = paper()["inputs"][name]["layers"]
    num_forward, num_backward = paper()["roundpipe_plan_stages_forward_backward"][name]
    forward = _even(num_layers, num_forward)
    deepest_first = _even(num_layers, num_backward - 1)
    backward = [range(num_layers - cut.stop, num_layers - cut.start) for cut in deepest_first]
    return ExecutionPlan(forward, [range(num_layers, num_layers + 1), *backward])


def _even(count: int, num_stages: int) -> list[range]:
    bounds = [count * index // num_stages for index in range(num_stages + 1)]
    sizes = sorted(stop - start for start, stop in pairwise(bounds))
    stages, start = [], 0
    for size in sizes:
        stages.append(range(start, start + size))
        start += size
    return stages


def h200_models() -> Iterator[Model]:
    """The measured models; a hop is the boundary's bytes to the host and from it."""
    for name, given in json.loads((DATA / "layer_times_h200.json").read_text())["models"].items():
        layers = given["layers"]
        yield Model(
            name,
            [layer["fwd_ms"] for layer in layers],
            [layer["fwd_ms"] + layer["bwd_ms"] for layer in layers],
            2 * given["boundary_bytes"] / (H200_LINK_GB_PER_S * 1e6),
        )


@cache
def figure19() -> dict[str, dict[str, Simulation]]:
    """Our simulation of every row and model of the figure, and of our own plans ("partition")."""
    rows: dict[str, dict[str, Simulation]] = {row: {} for row in (*NAMES, "roundpipe-sync", "partition")}
    for name in paper()["inputs"]:
        with_embedding = paper_model(name, embedding=True)
        for row, schedule in NAMES.items():
            looped = schedule in ("interleaved", "looped_bfs")
            num_stages = len(with_embedding.forward_ms) // DEVICES * DEVICES if looped else DEVICES
            rows[row][name] = with_embedding.simulate(paper_stages(with_embedding, num_stages), schedule)
        model = paper_model(name, embedding=False)
        rows["roundpipe-sync"][name] = model.simulate(paper_plan(name))
        rows["partition"][name] = model.simulate(model.partition())
    return rows


@cache
def figure19_asynchronous() -> dict[str, tuple[float, float]]:
    """Steady bubble of the paper's numbers of stages and of our asynchronous plan, per model."""
    models = [paper_model(name, embedding=False) for name in paper()["inputs"]]
    return {
        model.name: (model.steady_bubble(paper_plan(model.name)), model.steady_bubble(model.partition(True)))
        for model in models
    }


@dataclass(frozen=True)
class H200Row:
    """Bubbles on measured times: the best bound schedule under its best cut, and RoundPipe under our plans."""

    baseline: str
    baseline_bubble: float
    synchronous: float
    asynchronous: float
    chain: float

    @property
    def cut(self) -> float:
        """By how much the synchronous schedule cuts the baseline's bubble."""
        return 1 - self.synchronous / self.baseline_bubble


@cache
def h200() -> dict[str, H200Row]:
    """The H200 table."""
    rows = {}
    for model in h200_models():
        tried = []
        for schedule in NAMES.values():
            most = len(model.forward_ms) // DEVICES if schedule in ("interleaved", "looped_bfs") else 1
            for stages in range(1, most + 1):
                plan = bound_plan(model.forward_ms, model.backward_ms, stages * DEVICES)
                found = model.simulate(plan, schedule)
                tried.append((found.bubble, f"{schedule}, {stages} a device"))
        bubble, baseline = min(tried)
        synchronous = model.simulate(model.partition()).bubble
        rows[model.name] = H200Row(
            baseline, bubble, synchronous, model.steady_bubble(model.partition(True)), model.chain_bubble()
        )
    return rows


def figure19_table() -> str:
    """Markdown: ours, and the paper's in brackets, percent."""
    published = paper()["bubble_percent"]
    names = list(paper()["inputs"])
    lines = ["| schedule | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    rows = figure19()
    for row in (*NAMES, "roundpipe-sync"):
        cells = [f"{100 * rows[row][name].bubble:.2f} ({published[row][name]:.2f})" for name in names]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    asynchronous = figure19_asynchronous()
    cells = [f"{100 * asynchronous[name][0]:.2f} ({published['roundpipe'][name]:.2f})" for name in names]
    lines.append("| roundpipe, asynchronous | " + " | ".join(cells) + " |")
    cells = [f"**{100 * rows['partition'][name].bubble:.2f}**" for name in names]
    lines.append("| `partition`, synchronous | " + " | ".join(cells) + " |")
    cells = [f"**{100 * asynchronous[name][1]:.2f}**" for name in names]
    lines.append("| `partition`, asynchronous | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def h200_table() -> str:
    """Markdown, percent."""
    lines = [
        "| model | best bound schedule | its bubble | RoundPipe sync | cut by | least of any schedule | async |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in h200().items():
        lines.append(
            f"| {name} | {row.baseline} | {100 * row.baseline_bubble:.2f} | {100 * row.synchronous:.2f} | "
            f"{100 * row.cut:.0f}% | {100 * row.chain:.2f} | {100 * row.asynchronous:.2f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"figure 19": figure19_table, "H200": h200_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the markers <!-- table: NAME -->")
    page = parser.parse_args().write
    text = page.read_text() if page else ""
    for name, make in TABLES.items():
        table = make()
        print(f"{name}\n{table}\n")
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", text, flags=re.S)
    if page:
        page.write_text(text)


if __name__ == "__main__":
    main()
