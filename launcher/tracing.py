"""`rpctl trace`: the table and the picture of a recorded run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from launcher.choosing import Refused
from rpruntime.trace.chrome import read_trace
from rpruntime.trace.picture import last_iterations, svg
from rpruntime.trace.report import reports


def trace(words: list[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rpctl trace",
        description="Where the devices' time went in a run that was recorded with rplaunch --trace FILE or "
        "pipe.trace(FILE), beside what the simulator says of the same plan and layer times; and a picture of it. "
        "ui.perfetto.dev opens the same file.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="where the picture goes (default: FILE with .svg)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="the picture shows the last N steps (2)")
    parser.add_argument("--json", action="store_true", help="the table for programs, and no picture")
    options = parser.parse_args(words)
    if options.steps < 1:
        raise Refused("--steps must be 1 or more", 2)
    picture: Path = options.picture or options.file.with_suffix(".svg")
    if picture.suffix != ".svg":
        raise Refused(f"pictures are SVG, which browsers show: {picture.with_suffix('.svg')}, not {picture}", 2)
    if not options.json and picture.resolve() == options.file.resolve():
        raise Refused(f"the picture would replace the trace {options.file}: say --picture OTHER.svg", 2)
    data = read_trace(options.file)
    found = reports(data)
    if options.json:
        print(json.dumps([_row(report) for report in found], indent=1))
        return 0
    if data.note:
        print(f"this trace is {data.note}")
    if not found:
        print("the trace holds no whole iteration")
    for report in found:
        print("\n".join(report.lines()))
    picture.write_text(svg(data, *last_iterations(data, options.steps)), encoding="utf-8")
    print(f"picture  {picture}")
    return 0


def _row(report: object) -> dict[str, object]:
    row = dataclasses.asdict(report)  # type: ignore[call-overload]
    plan = row.pop("plan")
    stages = {kind: [[stage.start, stage.stop] for stage in plan[kind]] for kind in ("forward", "backward")}
    return {**row, **stages, "round_size": plan["round_size"]}
