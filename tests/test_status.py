"""The status page: what is written is read, also after a SIGKILL in the middle of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest

from rpruntime.status import PAGE_BYTES, NullStatus, Status, StatusPage, StatusWriter, read, status_path
from tests.leaks import open_descriptors

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = status_path(tmp_path, "worker-1", 2)
    assert path.name == "worker-1.2.status"
    assert read(path) is None
    before, descriptors = time.monotonic_ns(), open_descriptors()
    page = StatusPage.create(path)
    assert open_descriptors() == descriptors + 1, "the mapping's own"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == PAGE_BYTES
    found = read(path)
    assert found is not None
    assert before <= found.heartbeat_ns <= time.monotonic_ns()
    assert found == Status(heartbeat_ns=found.heartbeat_ns)
    page.at(7, "backward", 3, 1)
    page.set_busy(True)
    page.finishing(6)
    again = read(path)
    assert again == Status(found.heartbeat_ns, True, 3, 6, 7, 3, 1, "backward")
    page.at(0)
    page.beat()
    idle = read(path)
    assert idle is not None
    assert (idle.slot, idle.layer, idle.microbatch, idle.phase) == (0, -1, -1, "")
    assert idle.heartbeat_ns > found.heartbeat_ns
    with pytest.raises(FileExistsError):
        StatusPage.create(path)


def test_what_counts_as_progress(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "page")

    def moved() -> bool:
        nonlocal last
        found = read(tmp_path / "page")
        assert found is not None
        before, last = last, found.progress
        return last != before

    last = 0
    for act, moves in (
        (lambda: page.set_busy(True), True),
        (lambda: page.set_busy(True), False),
        (lambda: page.set_busy(False), True),
        (lambda: page.at(0), False),
        (lambda: page.at(1, "forward", 0, 0), True),
        (lambda: page.at(1, "forward", 0, 0), True),
        (lambda: page.at(0), True),
        (lambda: page.at(0), False),
        (lambda: page.finishing(1), True),
        (lambda: page.finishing(1), False),
        (lambda: page.finishing(0), True),
        (page.progress, True),
        (page.beat, False),
    ):
        act()
        assert moved() == moves


def test_a_launched_slot_is_work(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "page")

    def busy() -> bool:
        found = read(tmp_path / "page")
        assert found is not None
        return found.busy

    assert not busy()
    page.at(4, "forward", 0, 0)
    assert busy(), "also before the worker has come to say so"
    page.at(0)
    page.finishing(4)
    assert busy()
    page.finishing(0)
    assert not busy()
    page.set_busy(True)
    assert busy()
    page.set_busy(False)
    assert not busy()


@pytest.mark.parametrize(
    "finishing, slot, slots", [(0, 0, ()), (0, 4, (4,)), (3, 4, (3, 4)), (4, 4, (4,)), (3, 0, (3,))]
)
def test_slots_that_were_running(finishing: int, slot: int, slots: tuple[int, ...]) -> None:
    assert Status(finishing=finishing, slot=slot).slots == slots


def test_long_and_odd_phases(tmp_path: Path) -> None:
    page = StatusPage.create(tmp_path / "page")
    for phase, seen in (("x" * 40, "x" * 24), ("ü" * 20, "ü" * 12), ("a" + "ü" * 12, "a" + "ü" * 11 + "�"), ("", "")):
        page.at(1, phase, 2, 3)
        found = read(tmp_path / "page")
        assert found is not None
        assert (found.phase, found.slot, found.layer, found.microbatch) == (seen, 1, 2, 3)


@pytest.mark.parametrize("content", [b"", b"\0" * 10, b"\0" * PAGE_BYTES])
def test_a_page_that_is_not_written_yet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "page").write_bytes(content)
    assert read(tmp_path / "page") is None


def test_it_is_there_after_a_kill(tmp_path: Path) -> None:
    """Killed while it writes as fast as it can: the slot is one that was written, the place no other than its."""
    code = """
import sys
from pathlib import Path
from rpruntime.status import StatusPage, start_heartbeat
page = StatusPage.create(Path(sys.argv[1]))
start_heartbeat(page)
assert "torch" not in sys.modules
page.set_busy(True)
print("on", flush=True)
slot = 0
while True:
    slot += 1
    page.finishing(slot)
    page.at(slot, "forward", slot, slot)
"""
    path = tmp_path / "page"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    live = read(path)
    assert live is not None and live.busy
    while (now := read(path)) is not None and now.slot < live.slot + 10000:
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    found = read(path)
    assert found is not None
    assert found.slot >= live.slot + 10000
    assert found.finishing - found.slot in (0, 1)
    assert found.layer in (found.slot, found.slot - 1)
    assert found.microbatch in (found.slot, found.slot - 1)
    assert found.phase == "forward"


def test_where_nobody_watches() -> None:
    quiet: StatusWriter = NullStatus()
    quiet.beat()
    quiet.at(1, "forward", 2, 3)
    quiet.progress()
    quiet.set_busy(True)
    quiet.finishing(1)


def test_it_costs_little(tmp_path: Path) -> None:
    """0.2 us measured; it is called for every layer of every micro-batch."""
    page = StatusPage.create(tmp_path / "page")
    best = min(timeit.repeat(lambda: page.at(5, "forward", 3, 1), number=10000, repeat=5)) / 10000
    print(f"{best * 1e6:.2f} us")
    assert best < 10e-6
