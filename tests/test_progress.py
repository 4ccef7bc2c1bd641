"""The controller's page: what is written is read, whole, also while it is being written."""

from __future__ import annotations

import json
import stat
import threading
import timeit
from pathlib import Path

from rpruntime.progress import PAGE_BYTES, ProgressPage, progress_path, read_progress
from tests.leaks import open_descriptors


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    descriptors = open_descriptors()
    page = ProgressPage.create(progress_path(tmp_path))
    assert stat.S_IMODE(progress_path(tmp_path).stat().st_mode) == 0o600
    assert read_progress(tmp_path) is None, "nothing has been written"
    assert page.write({"a": [1, 2.5, None, "ü"]})
    assert read_progress(tmp_path) == {"a": [1, 2.5, None, "ü"]}
    assert page.write({"b": 1})
    assert read_progress(tmp_path) == {"b": 1}
    assert not page.write({"c": "x" * PAGE_BYTES})
    assert read_progress(tmp_path) == {"b": 1}, "too large: the old one stays"
    page.close()
    assert open_descriptors() == descriptors
    assert read_progress(tmp_path) == {"b": 1}
    page = ProgressPage.create(progress_path(tmp_path))  # the next controller of the session
    assert page.write({"d": 2})
    assert read_progress(tmp_path) == {"d": 2}
    page.close()


def test_a_writer_that_died_half_way(tmp_path: Path) -> None:
    path = progress_path(tmp_path)
    ProgressPage.create(path).write({"a": 1})
    with path.open("r+b") as file:
        file.write((7).to_bytes(8, "little"))
    assert read_progress(tmp_path) is None
    page = ProgressPage.create(path)
    page.write({"b": 2})
    assert read_progress(tmp_path) == {"b": 2}


def test_files_that_are_no_page(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 8, b"\2" + b"\0" * 7 + b"\3" + b"\0" * 7 + b"{{{"):
        progress_path(tmp_path).write_bytes(content)
        assert read_progress(tmp_path) is None


def test_readers_never_see_two_contents_mixed(tmp_path: Path) -> None:
    page = ProgressPage.create(progress_path(tmp_path))
    page.write({"n": 0, "rows": []})
    done = threading.Event()

    def write() -> None:
        for number in range(3000):
            page.write({"n": number, "rows": [number] * (number % 200)})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not done.is_set():
        found = read_progress(tmp_path)
        if found is not None:
            assert found["rows"] == [found["n"]] * (found["n"] % 200)
            seen += 1
    writer.join()
    assert seen and read_progress(tmp_path) == {"n": 2999, "rows": [2999] * (2999 % 200)}


def test_it_costs_little(tmp_path: Path) -> None:
    """Some 50 us for a page of 4 KB; it is written five times a second at most."""
    page = ProgressPage.create(progress_path(tmp_path))
    body = {"devices": [{"role": f"worker-{n}", "busy": 0.5} for n in range(100)]}
    assert 3000 < len(json.dumps(body)) < 5000
    best = min(timeit.repeat(lambda: page.write(body), number=100, repeat=5)) / 100
    print(f"{best * 1e6:.0f} us")
    assert best < 2e-3
