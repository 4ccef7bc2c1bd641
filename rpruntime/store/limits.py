"""How much host memory there is: four numbers that differ, each with its own remedy.

    tmpfs     size of /dev/shm        docker --shm-size, mount -o remount,size=
    cgroup    limit of the container  docker --memory, the pod's limits.memory, systemd MemoryMax=
    RAM       MemAvailable            a larger machine; --host-memory where the reading is wrong
    memlock   ulimit -l               ulimit -l unlimited, docker --ulimit memlock=-1

Readers take the root of the file system as an argument, so that tests can bring their own. Some virtual
machines start with a small MemTotal that grows as memory is used: there MemAvailable is no limit, and
`--host-memory GIB` replaces it. Nothing replaces the tmpfs and the cgroup, which the kernel enforces.

A full tmpfs is an error, a full cgroup or RAM is the out-of-memory killer, which takes any process. So of those
two a margin stays free for what is not ours to count: page tables, stacks, the processes' own heaps.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from rpruntime.errors import HostMemoryError

GIB = 1 << 30
_MARGIN_SHARE = 50
_MAX_MARGIN_BYTES = 1 * GIB
# cgroup v1 says "no limit" as the largest page-aligned signed 64-bit number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory. `cgroup_*` is of the ancestor with the least room; None: no limit anywhere."""

    shm_total: int
    shm_free: int
    cgroup_limit: int | None
    cgroup_used: int
    ram_total: int
    ram_available: int

    @property
    def cgroup_free(self) -> int | None:
        """Room under the cgroup's limit."""
        return None if self.cgroup_limit is None else max(0, self.cgroup_limit - self.cgroup_used)

    def available(self, override_gib: float | None = None, held_bytes: int = 0) -> tuple[int, str]:
        """The smallest figure, less its margin, and which one it is: "shm", "cgroup" or "ram" ("flag" with
        `override_gib`, which counts from zero: what the session holds already, `held_bytes`, comes off it)."""
        figures = [(self.shm_free, "shm")]
        if self.cgroup_limit is not None and self.cgroup_free is not None:
            figures.append((max(0, self.cgroup_free - margin(self.cgroup_limit)), "cgroup"))
        if override_gib is None:
            figures.append((max(0, self.ram_available - margin(self.ram_total)), "ram"))
        else:
            figures.append((max(0, int(override_gib * GIB) - held_bytes), "flag"))
        return min(figures)


def margin(limit_bytes: int) -> int:
    """What stays free of a limit behind which the out-of-memory killer waits: 2 %, at most 1 GiB."""
    return min(limit_bytes // _MARGIN_SHARE, _MAX_MARGIN_BYTES)


def gib(nbytes: int) -> str:
    """Bytes for people: GiB, or MiB below one GiB."""
    if nbytes < GIB:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / GIB:.1f} GiB"


def read_host_memory(root: Path = Path("/"), shm: Path | None = None) -> HostMemory:
    """Read all figures below `root`; `shm` is the tmpfs (default `root/dev/shm`)."""
    stat = os.statvfs(shm if shm is not None else root / "dev/shm")
    meminfo = _read_meminfo(root)
    limit, used = read_cgroup(root)
    return HostMemory(
        shm_total=stat.f_frsize * stat.f_blocks,
        shm_free=stat.f_frsize * stat.f_bavail,
        cgroup_limit=limit,
        cgroup_used=used,
        ram_total=meminfo.get("MemTotal", 0),
        ram_available=meminfo.get("MemAvailable", meminfo.get("MemFree", 0)),
    )


def read_cgroup(root: Path = Path("/")) -> tuple[int | None, int]:
    """(limit, use) of the cgroup, own or above, with the least room; (None, 0) if none is limited.

    Clean file cache does not count as use: the kernel drops it before it refuses memory.
    """
    tightest: tuple[int | None, int] = (None, 0)
    for folder, is_v2 in cgroup_folders(root):
        limit = _read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _read_number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
        stat = _read_table(folder / "memory.stat")
        prefix = "" if is_v2 else "total_"
        cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        used = max(0, used - cache)
        if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
            tightest = (limit, used)
    return tightest


def cgroup_folders(root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Memory cgroups of this process, from its own up to the mount's root, as (folder, is version 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[tuple[Path, bool]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, is_v2 = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], True
        elif "memory" in controllers.split(","):
            mounts, is_v2 = ["sys/fs/cgroup/memory"], False
        else:
            continue
        for mount in mounts:
            # Inside a container the path may be the host's, which does not exist here: the walk up ends at
            # the mount.
            parts = [part for part in path.split("/") if part not in ("", "..")]
            above = [root / mount / Path(*parts[:count]) for count in range(len(parts), -1, -1)]
            # The root of version 2, and a tmpfs that holds the mounts of version 1, have no such file.
            mark = "memory.events" if is_v2 else "memory.limit_in_bytes"
            folders += [(folder, is_v2) for folder in above if (folder / mark).exists()]
    return folders


def check_host_memory(
    need_bytes: int, memory: HostMemory, *, override_gib: float | None = None, held_bytes: int = 0, what: str = ""
) -> None:
    """Refuse a need that does not fit.

    Args:
        need_bytes: shared memory about to be reserved, in bytes.
        memory: the figures, from `read_host_memory`.
        override_gib: the flag `--host-memory`: replaces the reading of RAM.
        held_bytes: shared memory that the session has reserved before; counts against the flag only, as the readings
            know of it.
        what: what needs it, for the message.

    Raises:
        HostMemoryError: it does not fit; the message has all figures and the remedy.
    """
    room, which = memory.available(override_gib, held_bytes)
    if need_bytes <= room:
        return
    kept = ""
    if which in ("cgroup", "ram"):
        kept_bytes = margin((memory.cgroup_limit or 0) if which == "cgroup" else memory.ram_total)
        kept = f"; of the {which.replace('ram', 'RAM')} {gib(kept_bytes)} stay free for the processes' own use"
    elif which == "flag" and held_bytes:
        kept = f"; {gib(held_bytes)} of that are reserved already"
    raise HostMemoryError(
        f"{what or 'this run'} needs {gib(need_bytes)} ({need_bytes} bytes) of host memory, "
        f"{gib(room)} ({room} bytes) are available: {figures(memory, override_gib)}{kept}. {_REMEDY[which]}"
    )


def figures(memory: HostMemory, override_gib: float | None = None) -> str:
    """The three numbers in words."""
    cgroup = "none"
    if memory.cgroup_limit is not None:
        cgroup = f"{gib(memory.cgroup_free or 0)} free of {gib(memory.cgroup_limit)}"
    ram = f"{gib(memory.ram_available)} available of {gib(memory.ram_total)}"
    if override_gib is not None:
        ram += f", taken as {override_gib:g} GiB (--host-memory)"
    return (
        f"shared memory /dev/shm {gib(memory.shm_free)} free of {gib(memory.shm_total)}, "
        f"cgroup limit {cgroup}, RAM {ram}"
    )


_REMEDY = {
    "shm": "Enlarge /dev/shm: `docker run --shm-size=...`, a pod's emptyDir with medium Memory, or "
    "`mount -o remount,size=... /dev/shm`.",
    "cgroup": "Raise the memory limit of the container (`docker run --memory=...`, the pod's limits.memory) "
    "or of the cgroup (memory.max).",
    "ram": "Free memory or use a larger machine; where the reading is wrong (a virtual machine whose memory "
    "grows), give the real figure with `--host-memory GIB`.",
    "flag": "Raise `--host-memory GIB` if the machine has more.",
}


def memlock_problem(need_bytes: int) -> str | None:
    """None, or a sentence if `ulimit -l` is below `need_bytes` of pinned memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or need_bytes <= soft:
        return None
    most = "unlimited" if hard == resource.RLIM_INFINITY else gib(hard)
    return (
        f"{gib(need_bytes)} are to be pinned but `ulimit -l` is {gib(soft)} (hard limit {most}): raise it "
        "with `ulimit -l unlimited`, `docker run --ulimit memlock=-1` or a line in /etc/security/limits.conf."
    )


def memlock_text() -> str:
    """`ulimit -l` for people."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)


def map_limits(root: Path = Path("/")) -> str:
    """What limits this process's mappings, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    space = "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)
    count = _read_number(root / "proc/sys/vm/max_map_count")
    return f"this process may map {space} (`ulimit -v`) in {count} pieces (vm.max_map_count)"


def _read_meminfo(root: Path) -> dict[str, int]:
    found = {}
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of "name number"; anything else is left out."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
