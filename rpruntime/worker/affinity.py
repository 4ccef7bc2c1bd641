"""`--cpu-affinity numa`: each worker keeps to the cores of its GPU's node. The optimizer, whose memory lies on
all nodes, runs on any core.

    /sys/devices/system/node/node1/cpulist            16-31,48-63
    /sys/bus/pci/devices/0000:c1:00.0/numa_node       1; -1: the firmware does not tell
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SYS = Path("/sys")


def parse_cpulist(text: str) -> frozenset[int]:
    """Cores of a kernel's list, "0-3,8" for 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    """Cores of each NUMA node that has any."""
    found = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        try:
            cores = parse_cpulist((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def node_of(pci: str, root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device, "0000:c1:00.0"; None: not known."""
    if not pci:
        return None
    try:
        node = int((root / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_address(properties: Any) -> str:
    """Where the GPU of these CUDA device properties sits, "0000:c1:00.0"; "": this torch does not tell."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""


def worker_cores(pci: str, allowed: Iterable[int], root: Path = SYS) -> frozenset[int] | None:
    """Where the worker of a GPU is to run, of the cores that it may use; None: anywhere."""
    known, node = nodes(root), node_of(pci, root)
    if len(known) < 2 or node not in known:
        return None
    return (known[node] & frozenset(allowed)) or None


def bind(cores: frozenset[int] | None) -> None:
    """Keep this process, and the threads that it starts from now on, to these cores."""
    if cores is None:
        log.info("cpu affinity: no node to keep to, %d cores", len(os.sched_getaffinity(0)))
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as err:
        log.warning("cpu affinity: %d cores refused: %s", len(cores), err)
    else:
        log.info("cpu affinity: cores %s", ",".join(map(str, sorted(cores))))
