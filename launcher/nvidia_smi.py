"""What nvidia-smi tells of the driver and of the processes that have a context on a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 20.0

Query = Callable[[str], "list[list[str]] | None"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. `pid` is as the driver sees it, which a container's pid namespace may not."""

    uuid: str
    pid: int
    name: str = ""
    memory_bytes: int = 0


def query(question: str) -> list[list[str]] | None:
    """Rows of `nvidia-smi --query-...`, cut at commas; None: there is no nvidia-smi, or it failed or hung."""
    command = ["nvidia-smi", f"--query-{question}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def driver_version(ask: Query = query) -> str:
    """The driver's version; "" if it is not known."""
    rows = ask("gpu=driver_version")
    return rows[0][0] if rows else ""


def compute_processes(ask: Query = query) -> tuple[GpuProcess, ...] | None:
    """Processes with a CUDA context, one entry for each GPU that they use; None: not known."""
    rows = ask("compute-apps=gpu_uuid,pid,used_memory,process_name")
    if rows is None:
        return None
    found = []
    for row in rows:
        if len(row) >= 4 and row[1].isdigit():
            memory = int(row[2]) << 20 if row[2].isdigit() else 0
            found.append(GpuProcess(row[0], int(row[1]), ",".join(row[3:]), memory))
    return tuple(found)


def misplaced(pids: Mapping[str, int], processes: Sequence[GpuProcess]) -> list[str]:
    """What is wrong with the contexts of a session: each worker has one, on a GPU of its own, and no other role any.

    Args:
        pids: of the session's processes, by role: "worker-0", "optimizer", "launcher", "script".
        processes: as `compute_processes` gave them while the session ran.
    """
    found: list[str] = []
    users: dict[str, list[str]] = {}
    for role, pid in pids.items():
        gpus = [process.uuid for process in processes if process.pid == pid]
        if role.startswith("worker-"):
            if len(gpus) != 1:
                found.append(f"{role} (pid {pid}) is on {len(gpus)} GPUs, not on one")
            for uuid in gpus:
                users.setdefault(uuid, []).append(role)
        elif gpus:
            found.append(f"{role} (pid {pid}) has a context on {', '.join(gpus)}")
    return found + [f"{', '.join(roles)} share {uuid}" for uuid, roles in users.items() if len(roles) > 1]


def has_opened_cuda(pid: int, root: Path = Path("/")) -> bool:
    """Whether a process has CUDA's memory driver open, which it has from `cuInit` on; also inside a container whose
    processes the driver does not list."""
    folder = root / "proc" / str(pid) / "fd"
    try:
        names = [os.readlink(entry) for entry in folder.iterdir()]
    except OSError:
        return False
    return any(name == "/dev/nvidia-uvm" for name in names)
