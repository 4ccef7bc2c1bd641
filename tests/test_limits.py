"""Readers of host memory: three different numbers, each with its remedy."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpruntime.errors import HostMemoryError
from rpruntime.store.limits import (
    GIB,
    HostMemory,
    check_host_memory,
    memlock_problem,
    read_cgroup,
    read_host_memory,
)
from tests.launching import small_cgroup

ROOT = Path(__file__).resolve().parent.parent
ROOMY = HostMemory(64 * GIB, 60 * GIB, None, 0, 128 * GIB, 100 * GIB)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    cg = "sys/fs/cgroup"
    write(tmp_path, {
        "proc/self/cgroup": "0::/pod/task\n",
        f"{cg}/pod/task/memory.max": "max\n",
        f"{cg}/pod/task/memory.current": "1000\n",
        f"{cg}/pod/task/memory.events": "oom_kill 0\n",
        f"{cg}/pod/memory.events": "oom_kill 0\n",
        f"{cg}/pod/memory.max": f"{2 * GIB}\n",
        f"{cg}/pod/memory.current": f"{GIB}\n",
        f"{cg}/pod/memory.stat": "anon 5\ninactive_file 100\nactive_file 11\n",
    })  # fmt: skip
    assert read_cgroup(tmp_path) == (2 * GIB, GIB - 111)


def test_cgroup_v1_and_no_limit(tmp_path: Path) -> None:
    cg = "sys/fs/cgroup/memory"
    write(tmp_path, {
        "proc/self/cgroup": "4:cpu,memory:/docker/abc\n0::/\n",
        f"{cg}/docker/abc/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{cg}/docker/abc/memory.usage_in_bytes": f"{GIB}\n",
        f"{cg}/docker/abc/memory.stat": "inactive_file 7\ntotal_inactive_file 10\ntotal_active_file 20\n",
        f"{cg}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{cg}/memory.usage_in_bytes": "1\n",
    })  # fmt: skip
    assert read_cgroup(tmp_path) == (3 * GIB, GIB - 30)
    (tmp_path / cg / "docker/abc/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_cgroup(tmp_path) == (None, 0)


def test_cgroup_path_of_the_host_inside_a_container(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "0::/../../host/path/unknown/here\n",
        "sys/fs/cgroup/memory.events": "",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "5\n",
    })  # fmt: skip
    assert read_cgroup(tmp_path) == (GIB, 5)


def test_nothing_to_read(tmp_path: Path) -> None:
    assert read_cgroup(tmp_path) == (None, 0)
    memory = read_host_memory(tmp_path, shm=tmp_path)
    assert (memory.ram_total, memory.cgroup_limit) == (0, None)


def test_this_machine() -> None:
    memory = read_host_memory()
    assert 0 < memory.shm_free <= memory.shm_total
    assert 0 < memory.ram_available <= memory.ram_total
    assert memory.available()[0] <= memory.shm_free


@pytest.mark.parametrize(
    "memory, which, remedy",
    [
        (HostMemory(64 << 20, 60 << 20, None, 0, 128 * GIB, 100 * GIB), "shm", "--shm-size"),
        (HostMemory(64 * GIB, 60 * GIB, 2 * GIB, GIB, 128 * GIB, 100 * GIB), "cgroup", "--memory"),
        (HostMemory(64 * GIB, 60 * GIB, None, 0, 4 * GIB, GIB), "ram", "--host-memory"),
    ],
)
def test_refusal_has_the_three_numbers_and_the_remedy(memory: HostMemory, which: str, remedy: str) -> None:
    assert memory.available()[1] == which
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(3 * GIB, memory, what="model default")
    text = str(caught.value)
    assert text.startswith("model default needs 3.0 GiB (3221225472 bytes)")
    assert remedy in text
    for word in ("/dev/shm", "cgroup limit", "RAM"):
        assert word in text
    assert isinstance(caught.value, MemoryError)


def test_flag_replaces_the_reading_of_ram_only() -> None:
    small_ram = HostMemory(64 * GIB, 60 * GIB, None, 0, 31 * GIB, 4 * GIB)
    with pytest.raises(HostMemoryError):
        check_host_memory(10 * GIB, small_ram)
    check_host_memory(10 * GIB, small_ram, override_gib=256)
    with pytest.raises(HostMemoryError, match="shm-size"):
        check_host_memory(61 * GIB, small_ram, override_gib=256)
    with pytest.raises(HostMemoryError, match="taken as 8 GiB"):
        check_host_memory(10 * GIB, ROOMY, override_gib=8)


def test_fits_exactly() -> None:
    check_host_memory(60 * GIB, ROOMY)
    with pytest.raises(HostMemoryError):
        check_host_memory(60 * GIB + 1, ROOMY)


def test_memlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 16 << 20))
    assert memlock_problem(8 << 20) is None
    text = memlock_problem(9 << 20)
    assert text is not None
    assert "9 MiB" in text
    assert "8 MiB" in text
    assert "ulimit -l unlimited" in text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memlock_problem(1 << 50) is None


def test_real_cgroup(real_cgroup: Path) -> None:
    code = "from rpruntime.store.limits import *; print(read_cgroup()[0], read_host_memory().available()[1])"
    join = f'echo $$ > {real_cgroup}/cgroup.procs; exec "$0" -c "$1"'
    done = subprocess.run(
        ["sh", "-c", join, sys.executable, code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == [str(256 << 20), "cgroup"]


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """A memory cgroup of 256 MiB, where we may make one."""
    with small_cgroup("rpruntime-test-limits", 256 << 20) as folder:
        yield folder
