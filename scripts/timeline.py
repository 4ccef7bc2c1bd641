"""Where the devices' time went, from a recorded run: RPRUNTIME_RECORD=FOLDER rplaunch ..., then

    python scripts/timeline.py FOLDER [--last SECONDS]

Prints, for each device, the share of time it computed and the idle time by what it waited to do next.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from rpruntime.recording import read
from rpruntime.wire.messages import SlotCommittedMsg, TaskMsg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--last", type=float, default=10.0, help="look at the last so many seconds (10)")
    options = parser.parse_args()
    kinds: dict[int, str] = {}
    spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    work: dict[str, list[float]] = defaultdict(list)
    for events, instructions in read(options.folder / "controller.record"):
        for instruction in instructions:
            msg = getattr(instruction, "msg", None)
            if isinstance(msg, TaskMsg):
                kinds[msg.task.slot] = f"{msg.task.kind} {msg.task.layers[1] - msg.task.layers[0]}"
        for event in events:
            if isinstance(event, SlotCommittedMsg):
                kind = kinds.get(event.slot, "?")
                first = min((row[3] for row in event.spans), default=0)
                for phase, start, stop, m, began, ended in event.spans:
                    where = "first micro-batch" if m == first else "later micro-batch"
                    spans[event.role].append((began, ended, f"{kind}, {where}"))
                    work[f"{phase} of {stop - start} layers"].append(ended - began)
    end = max(ended for rows in spans.values() for _, ended, _ in rows)
    for role, rows in sorted(spans.items()):
        rows = sorted(row for row in rows if row[0] > end - options.last * 1e3)
        gaps: dict[str, list[float]] = defaultdict(list)
        busy, until = 0.0, rows[0][0]
        for began, ended, kind in rows:
            if began > until:
                gaps[kind].append(began - until)
            busy += max(0.0, ended - max(began, until))
            until = max(until, ended)
        whole = until - rows[0][0]
        print(f"{role}: computed {busy / whole:.1%} of {whole / 1e3:.2f} s")
        for kind, found in sorted(gaps.items(), key=lambda item: -sum(item[1])):
            print(f"  idle {sum(found):9.1f} ms in {len(found):5} gaps before {kind}; longest {max(found):.1f}")
    for name, found in sorted(work.items(), key=lambda item: -sum(item[1])):
        row = sorted(found)
        middle, high = row[len(row) // 2], row[len(row) * 95 // 100]
        print(f"  {name:24} {len(row):6} x {middle:8.2f} ms (median), {high:.2f} (95%), {row[-1]:.1f} (most), sum {sum(row):.0f}")


if __name__ == "__main__":
    main()
