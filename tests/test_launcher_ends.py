"""Why a process ended, with injected counters; test_launcher_signals.py has real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.ends import OomCounter, describe_end, last_lines, without_log_prefix
from launcher.names import random_name

GIB = 1 << 30


def machine(root: Path, *, version: int, oom_kills: int, limit: str = str(2 * GIB), vmstat: int = 0) -> Path:
    """A file system with a cgroup and its counter."""
    folder = root / "sys/fs/cgroup" / ("pod" if version == 2 else "memory/pod")
    folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n" if version == 2 else "4:memory:/pod\n")
    (root / "proc/vmstat").write_text(f"nr_free 5\noom_kill {vmstat}\n")
    (root / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 1 kB\n")
    if version == 2:
        (folder / "memory.max").write_text(limit)
        (folder / "memory.events").write_text(f"low 0\noom {oom_kills}\noom_kill {oom_kills}\n")
    else:
        (folder / "memory.limit_in_bytes").write_text(limit)
        (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kills}\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_counter_of_the_cgroup_rose(tmp_path: Path, version: int) -> None:
    before = OomCounter.read(machine(tmp_path, version=version, oom_kills=1))
    machine(tmp_path, version=version, oom_kills=2, vmstat=1)
    text = describe_end(-9, before, tmp_path)
    assert text.startswith("out of host memory")
    assert "the cgroup's limit is 2.0 GiB" in text


@pytest.mark.parametrize("version", [1, 2])
def test_counter_did_not_rise(tmp_path: Path, version: int) -> None:
    before = OomCounter.read(machine(tmp_path, version=version, oom_kills=1))
    text = describe_end(-9, before, tmp_path)
    assert text.startswith("killed by signal 9 (SIGKILL)")
    assert "out of host memory" not in text


def test_whole_machine_ran_out(tmp_path: Path) -> None:
    before = OomCounter.read(machine(tmp_path, version=2, oom_kills=0, limit="max", vmstat=3))
    machine(tmp_path, version=2, oom_kills=0, limit="max", vmstat=4)
    assert "the machine has 16.0 GiB" in describe_end(-9, before, tmp_path)


@pytest.mark.parametrize(
    "returncode, words",
    [
        (3, "exit code 3"),
        (0, "exit code 0"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-7, "killed by signal 7 (SIGBUS)"),
        (-6, "killed by signal 6 (SIGABRT)"),
        (-63, "killed by signal 63"),
    ],
)
def test_words(tmp_path: Path, returncode: int, words: str) -> None:
    root = machine(tmp_path, version=2, oom_kills=0)
    text = describe_end(returncode, OomCounter.read(root), root)
    assert text.startswith(words)
    assert ("/dev/shm" in text) == (returncode == -7)


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    assert last_lines(log) == []
    log.write_bytes(b"x\n" * 50000 + b"first\n\n\xff second \n" + b"y" * 1000)
    lines = last_lines(log, 3)
    assert lines[0] == "first"
    assert lines[1].endswith("second")
    assert len(lines[2]) == 300


def test_end_of_a_log_without_what_a_predecessor_wrote(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("old\nnew\n")
    assert last_lines(log, start=4) == ["new"]
    assert last_lines(log, start=8) == []


def test_line_of_a_log() -> None:
    assert without_log_prefix("08:30:11.123 worker-0 ERROR RuntimeError: 12:00:00.000") == "RuntimeError: 12:00:00.000"
    assert without_log_prefix("Killed") == "Killed"


def test_names_can_be_said() -> None:
    names = {random_name() for _ in range(200)}
    assert len(names) > 150
    assert all(name.replace("-", "").isalpha() and len(name) <= 20 for name in names)
