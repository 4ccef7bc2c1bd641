"""Which cores a worker keeps to, by a machine that is made of files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rpruntime.worker.affinity import bind, nodes, parse_cpulist, pci_address, worker_cores

GPU = "0000:c1:00.0"


def machine(root: Path, cpulists: dict[int, str], gpu_node: str | None) -> Path:
    for number, cpulist in cpulists.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")
    if gpu_node is not None:
        folder = root / "bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(gpu_node + "\n")
    return root


def test_a_worker_keeps_to_its_gpus_node_within_what_it_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, "1")
    assert nodes(root) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}, "memory alone is no node"
    assert worker_cores(GPU, range(16), root) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert worker_cores(GPU.upper(), {1, 2, 6}, root) == {6}
    assert worker_cores(GPU, {1, 2}, root) is None, "a container without a core of that node"


@pytest.mark.parametrize(
    "cpulists, gpu_node",
    [
        ({0: "0-7"}, "0"),
        ({0: "0-3", 1: "4-7"}, "-1"),
        ({0: "0-3", 1: "4-7"}, None),
        ({0: "?", 1: "4-7"}, "1"),
        ({}, None),
    ],
    ids=["one node", "not told", "no such device", "unreadable", "no nodes"],
)
def test_where_nothing_is_to_choose_a_worker_runs_anywhere(
    tmp_path: Path, cpulists: dict[int, str], gpu_node: str | None
) -> None:
    assert worker_cores(GPU, range(8), machine(tmp_path, cpulists, gpu_node)) is None


def test_lists_and_addresses() -> None:
    assert parse_cpulist("0-2,7, 9-9\n") == {0, 1, 2, 7, 9}
    assert parse_cpulist("\n") == frozenset()
    assert pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)) == GPU
    assert pci_address(SimpleNamespace()) == ""
    assert worker_cores("", range(8)) is None


def test_binding_is_logged_and_a_refusal_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rpruntime.worker.affinity")
    asked: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(cores))
    bind(frozenset({3, 1}))
    bind(None)
    assert asked == [{1, 3}]

    def refuse(pid: int, cores: frozenset[int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind(frozenset({3}))
    assert "cores 1,3" in caplog.text and "no node to keep to" in caplog.text and "not here" in caplog.text
