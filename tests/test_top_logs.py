"""rpctl top and logs -f on a terminal, and a traced run, with real processes; log files and their lines."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher import choosing, logs, rpctl
from launcher.ends import without_log_prefix
from launcher.status import lines as status_lines
from launcher.top import Watch
from launcher.top_screen import screen
from rpruntime.logs import ControllerLog, LineFormatter
from rpruntime.progress import ProgressPage, progress_path
from rpruntime.status import StatusPage, status_path
from rpruntime.trace.chrome import read_trace
from rpruntime.trace.report import reports
from rpruntime.trace.spans import COMPUTE, COPIES
from tests.leaks import Watch as Leaks
from tests.leaks import no_leaks, wait_until

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "scripts" / "train_watched.py"


# --- a screen read back from a pseudo-terminal


class Terminal:
    """A program on a terminal of its own, 40 lines of 80."""

    def __init__(self, watch: Leaks, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        environ = {
            **os.environ,
            **watch.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
            "LINES": "40",
            "COLUMNS": "80",
        }
        self.popen = subprocess.Popen(
            words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C on it is a signal
        )
        os.close(theirs)
        watch.started.append(self.popen)
        self._data = b""

    @property
    def text(self) -> str:
        """All that was written so far, without what moves the cursor and colours."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self._data += data
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._data.decode(errors="replace"))

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        os.write(self._ours, b"\x03")
        return self.end()

    def end(self) -> int:
        """Wait for its end, reading on; returns the exit code."""
        wait_until(lambda: self.text is not None and self.popen.poll() is not None, 20.0, f"its end: {self.text!r}")
        return int(self.popen.returncode)

    def close(self) -> None:
        os.close(self._ours)


@contextlib.contextmanager
def terminal(watch: Leaks, *words: str) -> Iterator[Terminal]:
    found = Terminal(watch, *words)
    try:
        yield found
    finally:
        found.popen.kill()
        found.popen.wait()
        found.close()


def ctl(*words: str) -> list[str]:
    return [sys.executable, "-m", "launcher.rpctl", *words]


def test_a_watched_and_traced_run(tmp_path: Path) -> None:
    """One session for all: top once, as JSON and live, logs -f, and Ctrl-C in the script, which writes its trace."""
    name = f"watched-{os.getpid()}"
    go, trace = tmp_path / "go", tmp_path / "run.json"
    with no_leaks(within_s=10.0) as watch:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
        environ = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SCRIPT_GO": str(go), **watch.environ}
        command = [sys.executable, "-m", "launcher", "--devices", "cpu:2", "--name", name, "--trace", str(trace)]
        command += ["--log-dir", str(tmp_path)]
        with (tmp_path / "out").open("wb") as out:
            run = subprocess.Popen([*command, str(SCRIPT)], env=environ, stdout=out, stderr=out)
        watch.started.append(run)

        def said() -> str:
            return (tmp_path / "out").read_text()

        def trains() -> bool:
            assert run.poll() is None, said()
            return "trains" in said()

        wait_until(trains, 100.0, "training")
        with terminal(watch, *ctl("top", name)) as live, terminal(watch, *ctl("logs", name, "-f")) as followed:
            once = subprocess.run(ctl("top", name, "--once"), capture_output=True, text=True, env=environ, timeout=60)
            assert once.returncode == 0, once.stderr
            for text in (name, "cpu:0", "cpu:1", "computes", "loss", "items/s", "optimizer", "bubbles of step", "host"):
                assert text in once.stdout
            found = subprocess.run(ctl("top", name, "--json"), capture_output=True, text=True, env=environ, timeout=60)
            check_json(json.loads(found.stdout), name, run.pid)
            wait_until(lambda: "bubbles of step" in live.text, 60.0, "the live screen")
            assert "cpu:1" in live.text and "tokens" not in live.text
            wait_until(lambda: "[worker-1]" in followed.text, 60.0, "a line of a worker's log")
            assert live.interrupt() == 0, "Ctrl-C ends watching, and nothing else"
            assert "Traceback" not in live.text
            assert run.poll() is None
            go.touch()  # the script interrupts itself at its next step
            assert run.wait(60) == 130, said()
            assert followed.end() == 0, "it ends with the session"
            assert "controller INFO said by the script's process" in followed.text
    text = said()
    assert "spans in" in text and "simulated" in text, "the account is printed, also after Ctrl-C"
    data = read_trace(trace)
    assert data.devices == {"worker-0": "cpu:0", "worker-1": "cpu:1"}
    for role in data.devices:
        assert {COMPUTE, *COPIES} <= {span.stream for span in data.spans if span.role == role}
    assert {"optimizer", "controller"} <= {span.role for span in data.spans}
    (report,) = reports(data)
    assert len(report.iterations) > 3 and 0 < report.real.busy <= 1
    log_dir = tmp_path / name
    lines = (log_dir / "worker-0.log").read_text().splitlines()
    assert any(re.match(r"\d\d:\d\d:\d\d\.\d{3} worker-0 INFO \[slot \d+", line) for line in lines), lines
    assert stat.S_IMODE((log_dir / "controller.log").stat().st_mode) == 0o600


def check_json(found: dict[str, Any], name: str, launcher: int) -> None:
    assert found["session"] == name and found["page_age_s"] < 30
    assert [row["role"] for row in found["devices"]] == ["worker-0", "worker-1"]
    for row in found["devices"]:
        assert row["state"] == "ready" and 0 <= row["utilisation"] <= 1 and row["waiting_ms"] >= 0
        assert set(row["copies_bytes_per_s"]) == set(COPIES)
        if row["stage"] is not None:
            assert row["stage"]["kind"] in ("forward", "fused", "backward") and row["stage"]["step"] >= 0
    rates = [row["copies_bytes_per_s"][stream] for row in found["devices"] for stream in COPIES]
    assert any(rate > 0 for rate in rates), "it trains"
    (model,) = found["models"]
    assert model["values"]["step"] >= 1 and model["values"]["items_per_s"] > 0
    assert model["optimizer"]["of"] == 3 and 0 <= model["optimizer"]["units"] <= 3
    assert 0 <= model["bubbles"]["bubble"] < 1
    assert found["memory"]["weights"] > 0 and found["memory"]["optimizer"] > 0


# --- top without processes


VALUES = {
    "step": 12,
    "loss": 1.93,
    "lr": 1e-5,
    "grad_norm": 0.5,
    "step_s": 14.1,
    "optimizer_s": 2.0,
    "tokens_per_s": 24100.0,
    "items_per_s": 5.9,
}
BUBBLES = {
    "iteration": 12,
    "window_ms": 14e3,
    "bubble": 0.031,
    "fill": 0.01,
    "switch": 0.001,
    "intra": 0.02,
    "drain": 0.0,
}
DEVICE = {"role": "worker-0", "device": "cuda:0", "name": "X", "memory_bytes": 24 * 2**30}
PAGE = {
    "pid": 1,
    "argv": ["train.py"],
    "monotonic_s": 100.0,
    "devices": [{**DEVICE, "peak_bytes": 2**33, "busy": 0.75}],
    "models": [
        {
            "name": "default",
            "layers": 38,
            "asynchronous": True,
            "plan": "6 forward, 17 backward stages",
            "values": VALUES,
            "optimizer": {"step": 13, "units": 19, "of": 38},
            "bubbles": BUBBLES,
        }
    ],
    "memory": {"weights": 2**34, "gradients": 0, "optimizer": 2**36},
    "slots": {"41": ["backward", 3, 5, 8, 13, 1]},
}


def a_session(folder: Path, incarnation: int = 1) -> None:
    body = {
        "name": folder.name,
        "script": {"pid": 7, "argv": ["train.py", "--fast"]},
        "config": {"log_dir": str(folder), "devices": ["cuda:0"]},
        "roles": {
            "optimizer": {"pid": 8, "incarnation": 1, "device": "", "state": "ready"},
            "worker-0": {"pid": 9, "incarnation": incarnation, "device": "cuda:0", "state": "ready"},
        },
    }
    (folder / "session.json").write_text(json.dumps(body))


def shown(found: dict[str, Any], width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(screen(found))
    return out.getvalue()


def test_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    alive = True
    monkeypatch.setattr("launcher.top.is_alive", lambda path: alive)
    watch = Watch(tmp_path, lambda: now)
    assert watch.look() is None, "there is no session"
    a_session(tmp_path)
    found = watch.look()
    assert found is not None and found["models"] == [] and found["page_age_s"] is None
    assert "no controller yet" in shown(found) and "idle" in shown(found)
    ProgressPage.create(progress_path(tmp_path)).write(PAGE)
    page = StatusPage.create(status_path(tmp_path, "worker-0", 1))
    page.at(41, "recompute", 4, 2)
    page.copied(0, 1000)
    watch.look()
    now = 102.0
    for kind, nbytes in enumerate((4 * 10**9, 2 * 10**6, 0, 10**8)):
        page.copied(kind, nbytes)
    found = watch.look()
    assert found is not None
    (row,) = found["devices"]
    assert row["stage"] == {"kind": "backward", "layers": [3, 5], "step": 13}
    assert (row["phase"], row["layer"], row["microbatch"], row["of_microbatches"]) == ("recompute", 4, 2, 8)
    assert row["waiting_ms"] == pytest.approx(3500.0)
    assert list(row["copies_bytes_per_s"].values()) == [2e9, 1e6, 0.0, 5e7]
    text = shown(found)
    for words in (
        "backward 3-4 of step 13", "recompute layer 4 mb 3", "75%", "3500 ms", "8.0 GiB of 24.0 GiB", "2.00 GB/s",
        "1.00 MB/s", "0.05 GB/s", "step 12   loss 1.93   grad norm 0.5   lr 1e-05   24.1k tok/s   5.9 items/s",
        "14.1 s a step", "[==========          ] 19 of 38 units", "bubbles of step 12  3.1%",
        "weights 16.0 GiB   optimizer 64.0 GiB", "train.py --fast",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "gradients 0" not in text, "nothing of that kind is in use"
    page.at(0)
    page.finishing(41)
    assert "on the device" in shown(watch.look() or {})
    now = 200.0
    assert "nothing new for 100 s" in shown(watch.look() or {})
    a_session(tmp_path, incarnation=2)  # its page is not there yet
    found = watch.look()
    assert found is not None and found["devices"][0]["copies_bytes_per_s"] is None
    assert "cuda:0 (process 2)" in shown(found)
    alive = False
    assert watch.look() is None


def a_device(number: int, **more: Any) -> dict[str, Any]:
    """What `Watch.look` has found of a GPU at work, with long figures."""
    return {
        "role": f"worker-{number}", "device": f"cuda:{number}", "name": "X", "pid": 9 + number, "state": "ready",
        "incarnation": 1 + number, "stage": {"kind": "backward", "layers": [13, 15], "step": 1813}, "slot": 41,
        "phase": "recompute", "layer": 14, "microbatch": 12, "of_microbatches": 16, "utilisation": 0.75,
        "waiting_ms": 3500.0, "peak_bytes": 2**33, "memory_bytes": 2**35,
        "copies_bytes_per_s": dict(zip(COPIES, (2e9, 1e9, 1e6, 1e10), strict=True)),
        "gpu": {"utilisation": 0.98, "used_bytes": 2**34}, **more,
    }  # fmt: skip


LARGE = {
    "session": "calm-otter",
    "argv": ["train.py", "--fast"],
    "script_pid": 7,
    "page_age_s": 1.0,
    "devices": [a_device(0), a_device(1)],
    "optimizer": "ready",
    "models": PAGE["models"],
    "memory": {"weights": 2**34, "gradients": 2**30, "activations": 2**30, "inputs": 2**30, "optimizer": 2**36},
}


def test_a_wide_terminal_has_everything() -> None:
    lines = shown(LARGE, 120).splitlines()
    row = "75% (98%)  3500 ms  16.0 GiB of 32.0 GiB"
    assert lines[2].split() == ["device", "stage", "now", "computes", "waits", "memory"]
    assert lines[4] == f"cuda:1 (process 2)  backward 13-14 of step 1813  recompute layer 14 mb 13  {row}"
    assert "24.1k tok/s   5.9 items/s   14.1 s a step" in "\n".join(lines)
    assert lines[-1].startswith("host memory") and lines[-1].endswith("optimizer 64.0 GiB")


def test_80_columns_are_enough() -> None:
    text = shown(LARGE, 80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for words in (
        "backward 13-14  recompute 14 mb 13       75%  3500 ms  16.0/32.0 GiB", "cuda:1 (2) ", "gradients down",
        "24.1k tok/s   14.1 s a step", "19 of 38 units, 2000 ms a step", "intra 2.0%   drain 0.0%",
        "optimizer 64.0 GiB",
    ):  # fmt: skip
        assert words in text, (words, text)
    worse = {**LARGE, "devices": [a_device(3, stage={"kind": "backward", "layers": [113, 115], "step": 9}, layer=113)]}
    text = shown(worse, 80)
    assert "waits" not in text and "backward 113-114  recompute 113 mb 13       75%  16.0/32.0 GiB" in text


def test_the_table_keeps_its_form_when_work_ends() -> None:
    idle = a_device(0, slot=0, stage=None)
    for width in range(70, 121):
        at_work = a_device(0, stage={"kind": "backward", "layers": [3, 5], "step": 19}, layer=4, microbatch=2)
        texts = [shown({**LARGE, "devices": [row]}, width).splitlines() for row in (idle, at_work)]
        assert texts[0][2] == texts[1][2]


@pytest.mark.parametrize("width", [1, 10, 30, 40, 60, 79, 80, 100])
def test_nothing_is_wrapped(width: int) -> None:
    """A narrower terminal cuts lines; each still begins as in a wide one."""
    wide, narrow = shown(LARGE, 200).splitlines(), shown(LARGE, width).splitlines()
    assert max(map(len, narrow)) <= width
    assert len(narrow) == len(wide) + 1, "only the kinds of memory take two lines"
    for whole, cut in zip(wide, narrow, strict=False):
        assert whole[: min(6, width - 1)] == cut[: min(6, width - 1)]


def test_news_are_seen_beside_a_long_command() -> None:
    found = {**LARGE, "argv": ["train.py", *("--word",) * 30], "page_age_s": 100.0}
    assert "calm-otter   nothing new for 100 s   train.py" in shown(found, 80).splitlines()[0]


def test_status_on_a_narrow_terminal() -> None:
    row = {
        "name": "calm-otter", "age_s": 12.0, "launcher_pid": 1, "script_pid": 2, "log_dir": "/tmp/" + "long/" * 20,
        "controller": {"pid": 2, "since": 0.0, "argv": ["train.py", *("--word",) * 20]}, "served": False,
        "roles": [{"role": "worker-0", "device": "cpu:0", "pid": 3, "state": "ready", "incarnation": 1}],
        "models": [], "memory_bytes": None,
    }  # fmt: skip
    whole, cut = status_lines(row), status_lines(row, 50)
    assert len(whole) == len(cut) == 4
    assert whole[1] == cut[1] == f"  logs         {row['log_dir']}/", "a path is of use as a whole only"
    assert whole[2].endswith("--word") and len(cut[2]) == 50 and cut[2].endswith("...")
    assert whole[3] == cut[3]


def test_top_without_a_session(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(choosing, "list_sessions", lambda *_: [])
    assert rpctl.main(["top"]) == 1
    assert "there is no session" in capsys.readouterr().err
    assert rpctl.main(["top", "nobody"]) == 1
    assert "no session nobody" in capsys.readouterr().err


# --- logs


def test_following_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "calm-otter"
    folder.mkdir()
    a_session(folder)
    for module in (choosing, logs):
        monkeypatch.setattr(module, "list_sessions", lambda *_: [folder])
        monkeypatch.setattr(module, "is_alive", lambda path: len(rounds) > 0)
    (folder / "optimizer.log").write_text("".join(f"line {number}\n" for number in range(30)))

    def first() -> None:
        (folder / "worker-0.log").write_text("one\ntwo, not yet who")

    def second() -> None:
        with (folder / "worker-0.log").open("a") as file:
            file.write("le\nthree\n")
        with (folder / "optimizer.log").open("a") as file:
            file.write("the last one without an end")

    rounds: list[Any] = [first, second]
    monkeypatch.setattr(time, "sleep", lambda _: rounds.pop(0)())
    assert rpctl.main(["logs", "-f"]) == 0
    lines = capsys.readouterr().out.splitlines()
    old = [f"[optimizer] line {number}" for number in range(20, 30)]
    expected = [*old, "[worker-0] one", "[optimizer] the last one without an end", "[worker-0] two, not yet whole"]
    assert lines == [*expected, "[worker-0] three"]

    (folder / "worker-0.log").unlink()
    rounds[:] = [first, lambda: second()]
    assert rpctl.main(["logs", "calm-otter", "cuda:0", "-f"]) == 0, "also one that is not there yet"
    assert capsys.readouterr().out == "one\ntwo, not yet whole\nthree\n"

    def interrupt() -> None:
        raise KeyboardInterrupt

    rounds[:] = [interrupt]
    assert rpctl.main(["logs", "worker-0", "-f"]) == 0
    assert capsys.readouterr().out == "one\ntwo, not yet whole\nthree\n"


def test_lines_name_the_task() -> None:
    lines = LineFormatter("worker-0")
    record = logging.LogRecord("rpruntime", logging.WARNING, "file", 1, "it %s", ("rains",), None)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} worker-0 WARNING it rains", lines.format(record))
    lines.task = lambda: "slot 12 layer 3"
    text = lines.format(record)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} worker-0 WARNING \[slot 12 layer 3\] it rains", text)
    assert without_log_prefix(text) == "it rains"


def test_the_task_of_a_status_page(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "page")
    assert page.task == ""
    page.at(12, "start")
    assert page.task == "slot 12"
    page.at(12, "forward", 3, 0)
    assert page.task == "slot 12 layer 3"


@contextlib.contextmanager
def clean_logging() -> Iterator[logging.Logger]:
    """The root without handlers, and our logger as a fresh script has it; all put back."""
    root, ours = logging.getLogger(), logging.getLogger("rpruntime")
    before = (root.level, root.handlers[:], ours.level, ours.handlers[:], ours.propagate)
    root.handlers[:], ours.handlers[:] = [], []
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.NOTSET)
    yield root
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])
    ours.handlers[:] = before[3]
    ours.propagate = before[4]


def test_the_script_keeps_its_logging(tmp_path: Path) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("rpruntime.somewhere")
    with clean_logging() as root:
        root.addHandler(handler)
        log = ControllerLog(tmp_path)
        assert root.handlers == [handler] and root.level == logging.WARNING
        assert not (tmp_path / "controller.log").exists(), "nothing was said"
        ours.info("one")
        ours.warning("two")
        ours.debug("three")
        root.setLevel(logging.INFO)  # the script sets up its logging later
        ours.info("four")
        logging.getLogger("rpruntime").setLevel(logging.ERROR)
        ours.warning("five")
        ours.error("six")
        assert heard == ["two", "four", "six"]
        logging.getLogger("rpruntime").setLevel(logging.DEBUG)
        ours.debug("seven")
        assert heard[-1] == "seven", "as the script wants it"
        log.close()
        assert logging.getLogger("rpruntime").level == logging.DEBUG, "that is the script's"
        assert logging.getLogger("rpruntime").propagate and not logging.getLogger("rpruntime").handlers
        ours.warning("eight")
        assert heard[-1] == "eight"
    lines = (tmp_path / "controller.log").read_text().splitlines()
    assert [line.split(" ", 3)[2:] for line in lines] == [
        ["INFO", "one"],
        ["WARNING", "two"],
        ["INFO", "four"],
        ["ERROR", "six"],
    ]
    assert stat.S_IMODE((tmp_path / "controller.log").stat().st_mode) == 0o600


def test_warnings_reach_a_script_that_has_set_up_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with clean_logging():
        log = ControllerLog(tmp_path, debug=True)
        logging.getLogger("rpruntime").debug("one")
        logging.getLogger("rpruntime").warning("two")
        log.close()
        assert logging.getLogger("rpruntime").level == logging.NOTSET
    assert capsys.readouterr().err == "two\n", "as logging's own last resort prints them"
    assert "DEBUG one" in (tmp_path / "controller.log").read_text()
