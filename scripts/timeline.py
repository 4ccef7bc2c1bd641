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
    rows: list[tuple[str, str, str, float, float]] = []  # role, kind of slot, phase, start, end
    peak: dict[str, int] = defaultdict(int)
    for events, instructions in read(options.folder / "controller.record"):
        for instruction in instructions:
            msg = getattr(instruction, "msg", None)
            if isinstance(msg, TaskMsg):
                kinds[msg.task.slot] = f"{msg.task.kind} {msg.task.layers[1] - msg.task.layers[0]}"
        for event in events:
            if isinstance(event, SlotCommittedMsg):
                peak[event.role] = max(peak[event.role], event.peak_bytes)
                first = min((row[3] for row in event.spans), default=0)
                for phase, start, stop, m, began, ended in event.spans:
                    kind = f"{kinds.get(event.slot, '?')}, {'first' if m == first else 'later'} micro-batch"
                    rows.append((event.role, kind, f"{phase} of {stop - start} layers", began, ended))
    since = max(row[4] for row in rows) - options.last * 1e3
    rows = [row for row in rows if row[3] > since]
    for role in sorted(peak):
        show_device(role, sorted((row[3], row[4], row[1]) for row in rows if row[0] == role), peak[role])
    work: dict[str, list[float]] = defaultdict(list)
    for _, kind, phase, began, ended in rows:
        work[f"{phase}, {kind.split(',')[0]}"].append(ended - began)
    for name, found in sorted(work.items(), key=lambda item: -sum(item[1])):
        row = sorted(found)
        middle, high = row[len(row) // 2], row[len(row) * 95 // 100]
        print(f"  {name:34} {len(row):5} x {middle:8.2f} ms median, {high:8.2f} 95%, {row[-1]:8.1f} most")


def show_device(role: str, spans: list[tuple[float, float, str]], peak: int) -> None:
    """One device: how much of the time it computed, and what it was to do next whenever it did not."""
    gaps: dict[str, list[float]] = defaultdict(list)
    busy, until = 0.0, spans[0][0]
    for began, ended, kind in spans:
        if began > until:
            gaps[kind].append(began - until)
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    whole = until - spans[0][0]
    print(f"{role}: computed {busy / whole:.1%} of {whole / 1e3:.2f} s, {peak / 1e9:.1f} GB at most")
    for kind, found in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:5]:
        print(f"  idle {sum(found):9.1f} ms in {len(found):5} gaps before {kind}; longest {max(found):.1f}")


if __name__ == "__main__":
    main()
