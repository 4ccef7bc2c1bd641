"""How far something long has come: on a terminal, in a file, and not at all."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from rpruntime import bar as bars
from rpruntime.bar import Bar

GIB = 1 << 30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` says to a bar."""
    now = [100.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    return now


def run(clock: list[float], seconds: int, *, quiet: bool = False) -> Bar:
    with Bar("writing weights", quiet=quiet) as bar:
        for half in range(2 * seconds + 1):
            clock[0] = 100.0 + half / 2
            bar.update(half * GIB, 2 * seconds * GIB)
    return bar


def test_in_a_file_a_line_every_two_seconds(clock, capsys):
    assert run(clock, 5).done == 10 * GIB
    assert capsys.readouterr().err.splitlines() == [
        "         writing weights, 4.0 GiB of 10.0 GiB ... 2 s",
        "         writing weights, 8.0 GiB of 10.0 GiB ... 4 s",
    ]


def test_what_is_short_or_quiet_says_nothing(clock, capsys):
    run(clock, 1)
    clock[0] = 100.0
    assert run(clock, 9, quiet=True).seconds == 9.0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("half_seconds", [0, 8])
def test_on_a_terminal_a_bar_that_goes_away(clock, monkeypatch, half_seconds):
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        with Bar("writing weights", quiet=False) as bar:
            for half in range(half_seconds + 1):
                clock[0] = 100.0 + half / 2
                bar.update(half * GIB, 16 * GIB)
        terminal.write("end")
        terminal.flush()
        shown = ""
        while not shown.endswith("end"):  # it comes in pieces
            shown += os.read(master, 1 << 20).decode()
    os.close(master)
    if half_seconds:
        assert "writing weights" in shown and "/16.0 GiB" in shown
        assert shown.rindex("\x1b[2K") > shown.rindex("writing weights"), "the line is cleared"
    else:
        assert shown == "end"
