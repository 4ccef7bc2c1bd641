"""rpctl doctor: faked machines with one thing wrong each, the readers on faked files, and this machine."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import nvidia_smi, rpctl, torch_probe
from launcher.devices import Gpu
from launcher.doctor import OK, PROBLEM, WARNING, Check, doctor, examine
from launcher.nvidia_smi import GpuProcess
from launcher.readings import (
    Logout,
    Machine,
    Temporary,
    read_container,
    read_logout,
    read_machine,
    read_temporary,
    torch_range,
)
from rpruntime.store.limits import GIB, HostMemory

NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
ROOMY = HostMemory(200 * GIB, 196 * GIB, None, 0, 251 * GIB, 240 * GIB)
GPUS = (Gpu("GPU-a", "NVIDIA H200", 141 * GIB), Gpu("GPU-b", "NVIDIA H200", 141 * GIB))
RATES = [{"device": f"cuda:{i}", "up_gb_per_s": 55.0, "down_gb_per_s": 54.0} for i in range(2)]
TORCH = {"version": "2.12.1+cu130", "cuda": "13.0", "available": 2, "error": "", "rates": RATES}
CONFIG = {"devices": ["cuda:0", "cuda:1"], "threads_per_worker": 4, "optimizer_threads": 28}
GOOD = Machine(
    memory=ROOMY,
    memlock=NO_LIMIT,
    open_files=(65536, 65536),
    cores=32,
    torch=TORCH,
    torch_range=("2.11", "2.14"),
    gpus=GPUS,
    driver="580.1",
    config=CONFIG,
)
CPU = dataclasses.replace(
    GOOD,
    gpus=(),
    driver="",
    torch={**TORCH, "version": "2.13.0+cpu", "cuda": None, "available": 0, "rates": []},
    config={"devices": ["cpu:0", "cpu:1"], "threads_per_worker": 16, "optimizer_threads": 30},
)


def changed(machine: Machine = GOOD, **fields: Any) -> list[Check]:
    return [check for check in examine(dataclasses.replace(machine, **fields)) if check.verdict != OK]


@pytest.mark.parametrize("machine", [GOOD, CPU], ids=["two GPUs", "no GPU"])
def test_a_good_machine_has_nothing_to_mend(machine: Machine) -> None:
    assert all(check.verdict == OK and not check.remedy for check in examine(machine))


def rates(**fields: Any) -> dict[str, Any]:
    return {**TORCH, "rates": [{**RATES[0], **fields}, RATES[1]]}


REFUSED = {**TORCH, "rates": [{"device": "cuda:0", "error": "CUDA refused to pin 0.25 GiB of segment x (error 2): y"}]}
SMALL_SHM = dataclasses.replace(ROOMY, shm_total=64 << 20, shm_free=60 << 20)
ONE_WRONG = {
    "shm is docker's default": (
        {"memory": SMALL_SHM, "container": "docker"}, PROBLEM, "shared memory", "60 MiB free of 64 MiB", "--shm-size"),
    "shm in a pod": ({"memory": SMALL_SHM, "container": "kubernetes"}, PROBLEM, "shared memory", "60 MiB", "emptyDir"),
    "shm without a container": ({"memory": SMALL_SHM}, PROBLEM, "shared memory", "60 MiB", "mount -o remount"),
    "no shm": ({"memory": None}, PROBLEM, "shared memory", "not there", "mount -t tmpfs"),
    "no segments": ({"segment_error": "OSError: x"}, PROBLEM, "shared memory", "fails: OSError: x", "remount"),
    "shm is a tenth of RAM": (
        {"memory": dataclasses.replace(ROOMY, shm_total=20 * GIB, shm_free=20 * GIB)},
        WARNING, "shared memory", "20.0 GiB free of 20.0 GiB", "Enlarge"),
    "cgroup is full": (
        {"memory": dataclasses.replace(ROOMY, cgroup_limit=8 * GIB, cgroup_used=8 * GIB)},
        PROBLEM, "host memory", "0 MiB free of the cgroup's 8.0 GiB", "--memory"),
    "cgroup is small": (
        {"memory": dataclasses.replace(ROOMY, cgroup_limit=8 * GIB, cgroup_used=GIB)},
        WARNING, "host memory", "the cgroup allows 6.8 GiB, about 0.41 G parameters", "--memory"),
    "RAM is full": (
        {"memory": dataclasses.replace(ROOMY, ram_available=1 << 20)},
        PROBLEM, "host memory", "1 MiB", "--host-memory"),
    "memlock is refused": (
        {"memlock": (8 << 20, 8 << 20), "torch": REFUSED},
        PROBLEM, "memlock", "8 MiB, and pinning 256 MiB", "limits.conf"),
    "memlock is 1 GiB": ({"memlock": (GIB, NO_LIMIT[1])}, WARNING, "memlock", "1.0 GiB", "ulimit -l unlimited"),
    "memlock in docker": (
        {"memlock": (GIB, GIB), "container": "docker"}, WARNING, "memlock", "1.0 GiB", "--ulimit memlock=-1"),
    "a GPU is held": (
        {"processes": (GpuProcess("GPU-b", 77, "python", 3 * GIB),)},
        WARNING, "GPU users", "GPU 1: 3.0 GiB held by python (pid 77)", "--devices"),
    "no nvidia-smi": ({"processes": None}, WARNING, "GPU users", "does not answer", "by hand"),
    "torch is old": (
        {"torch": {**TORCH, "version": "2.10.3"}},
        PROBLEM, "torch", "2.10.3, CUDA 13.0; 2.11 up to", "torch>=2.11,<2.14"),
    "torch is too new": ({"torch": {**TORCH, "version": "2.14.0"}}, PROBLEM, "torch", "2.14.0", "torch>=2.11,<2.14"),
    "torch without CUDA": ({"torch": {**TORCH, "cuda": None}}, PROBLEM, "torch", "cannot use", "Install a CUDA build"),
    "torch does not import": ({"torch": {"error": "importing torch fails: x"}}, PROBLEM, "torch", "fails: x", "pip"),
    "the driver is old": (
        {"torch": {**TORCH, "available": 0, "error": "driver too old", "rates": []}},
        PROBLEM, "torch", "driver too old", "Update the driver"),
    "PCIe is slow": ({"torch": rates(down_gb_per_s=1.6)}, WARNING, "PCIe", "cuda:0: 55 GB/s up, 2 GB/s down", "lanes"),
    "a GPU is broken": (
        {"torch": {**TORCH, "rates": [{"device": "cuda:0", "error": "unspecified launch failure"}]}},
        PROBLEM, "PCIe", "cuda:0 cannot be used: unspecified launch failure", "nvidia-smi"),
    "two cores": ({"cores": 2}, WARNING, "cores", "2 usable; 2 workers", "fewer devices"),
    "no such devices": (
        {"config": None, "config_error": "CUDA_VISIBLE_DEVICES='7': there is no GPU 7"},
        PROBLEM, "devices", "GPU 7", ""),
    "few files": ({"open_files": (64, 4096)}, PROBLEM, "open files", "is 64", "ulimit -n 4096"),
    "some files": ({"open_files": (512, 4096)}, WARNING, "open files", "is 512", "ulimit -n 4096"),
    "a session runs": ({"sessions": {"calm-otter": (5,)}}, WARNING, "sessions", "calm-otter", "rpctl stop"),
    "leftovers": ({"leftovers": ("sad-owl",)}, WARNING, "leftovers", "sad-owl", "rpctl clean"),
    "/tmp is read-only": ({"temporary": Temporary(writable=False)}, PROBLEM, "/tmp", "not writable", "chmod 1777"),
    "/tmp is full": ({"temporary": Temporary(free_bytes=1 << 20)}, PROBLEM, "/tmp", "only 1 MiB free", "Make room"),
    "/tmp is noexec": ({"temporary": Temporary(noexec=True)}, WARNING, "/tmp", "noexec", "TMPDIR"),
    "/tmp is taken": ({"temporary": Temporary(problem="belongs to uid 7")}, PROBLEM, "/tmp", "uid 7", "owner"),
    "no pidfd": ({"has_pidfd": False}, WARNING, "kernel", "no pidfd", "seccomp"),
    "logout kills": (
        {"logout": Logout("ann", kills_processes=True)},
        WARNING, "logout", "when you log out", "loginctl enable-linger ann"),
    "logout kills all the same": (
        {"logout": Logout("ann", kills_processes=True, lingers=True)},
        WARNING, "logout", "login", "Start it with `systemd-run"),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_WRONG)
def test_one_thing_wrong_is_named_with_its_remedy(case: str) -> None:
    fields, verdict, name, found, remedy = ONE_WRONG[case]
    checks = [check for check in changed(**fields) if check.name == name]
    assert [check.verdict for check in checks] == [verdict]
    assert found in checks[0].found
    assert remedy in checks[0].remedy


@pytest.mark.parametrize("case", ONE_WRONG)
def test_the_exit_code_says_whether_a_run_would_stop(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    fields, verdict, *_ = ONE_WRONG[case]
    machine = dataclasses.replace(GOOD, **fields)
    assert doctor([], lambda: machine) == (1 if verdict == PROBLEM else 0)
    assert f"\n{verdict} " in f"\n{capsys.readouterr().out}"


def test_nothing_else_is_wrong_where_one_thing_is() -> None:
    together = {"memlock is refused"}  # the device whose memory cannot be pinned cannot be used either
    for case in set(ONE_WRONG) - together:
        assert len(changed(**ONE_WRONG[case][0])) == 1, case


def test_memlock_that_the_driver_does_not_apply() -> None:
    assert changed(memlock=(8 << 20, 8 << 20)) == []
    assert changed(CPU, memlock=(8 << 20, 8 << 20)) == []


def test_a_gpu_that_a_session_of_ours_holds_is_named_by_it() -> None:
    held = changed(processes=(GpuProcess("GPU-a", 12, "python", GIB),), sessions={"calm-otter": (11, 12)})
    check = next(check for check in held if check.name == "GPU users")
    assert "held by session calm-otter" in check.found and "rpctl stop calm-otter" in check.remedy


def test_hidden_gpus_are_no_fault_of_torch() -> None:
    hidden = {**TORCH, "available": 0, "rates": []}
    assert changed(torch=hidden, config=CPU.config) == []


def test_logout_that_does_no_harm() -> None:
    assert changed(logout=Logout("ann")) == []


def test_json_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(["--json"], lambda: GOOD) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert {"name": "kernel", "verdict": "ok", "found": "pidfd is there", "remedy": ""} in rows
    assert printed.err == ""
    assert doctor(["--nonsense"], lambda: GOOD) == 2
    assert doctor(["--help"], lambda: GOOD) == 0
    assert "usage: rpctl doctor" in capsys.readouterr().out


# --- readers


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_logind_settings_in_the_order_of_systemd(tmp_path: Path) -> None:
    assert read_logout(tmp_path, "ann") is None
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert read_logout(tmp_path, "ann") == Logout("ann")
    write(tmp_path, {
        "usr/lib/systemd/logind.conf.d/50-a.conf": "[Login]\nKillUserProcesses=no\nRemoveIPC=no\n",
        "etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\nKillUserProcesses=no\n",
        "etc/systemd/logind.conf.d/60-b.conf": "[Login]\nKillUserProcesses=yes\n",
        "var/lib/systemd/linger/ann": "",
    })  # fmt: skip
    assert read_logout(tmp_path, "ann") == Logout("ann", kills_processes=True, removes_ipc=False, lingers=True)
    write(tmp_path, {"etc/systemd/logind.conf.d/50-a.conf": "[Login]\nKillUserProcesses=no\n"})  # in place of the other
    assert read_logout(tmp_path, "ben") == Logout("ben", kills_processes=True)
    write(tmp_path, {"etc/systemd/logind.conf.d/60-b.conf": "no section"})
    assert read_logout(tmp_path, "ben") == Logout("ben")


def test_containers(tmp_path: Path) -> None:
    assert read_container(tmp_path, {}) == ""
    write(tmp_path, {".dockerenv": ""})
    assert read_container(tmp_path, {}) == "docker"
    write(tmp_path, {"run/.containerenv": ""})
    assert read_container(tmp_path, {}) == "podman"
    assert read_container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"


def test_the_temporary_folder(tmp_path: Path) -> None:
    import os

    assert read_temporary(tmp_path).problem == "" and read_temporary(tmp_path).writable
    for suffix in ("", ".1", ".2", ".3", ".4"):
        assert read_temporary(tmp_path).problem == ""
        write(tmp_path, {f"rpruntime-{os.getuid()}{suffix}": "in the way"})
    assert "is in the way and no folder" in read_temporary(tmp_path).problem
    assert "cannot be read" in read_temporary(tmp_path / "missing").problem


def test_the_range_of_torch_is_that_of_the_package() -> None:
    least, below = torch_range()
    text = (Path(__file__).resolve().parent.parent / "setup.cfg").read_text()
    assert f"torch>={least},<{below}" in text


def test_rows_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[1])
        return SimpleNamespace(returncode=0, stdout="GPU-a, 41, 512, python\nGPU-b, 42, [N/A], a, b\n\n")

    asked: list[str] = []
    monkeypatch.setattr(subprocess, "run", run)
    assert nvidia_smi.compute_processes() == (
        GpuProcess("GPU-a", 41, "python", 512 << 20),
        GpuProcess("GPU-b", 42, "a,b", 0),
    )
    assert asked == ["--query-compute-apps=gpu_uuid,pid,used_memory,process_name"]
    assert nvidia_smi.driver_version(lambda _: [["580.1"], ["580.1"]]) == "580.1"
    assert nvidia_smi.driver_version(lambda _: []) == ""


@pytest.mark.parametrize("failure", ["missing", "hangs", "fails"])
def test_no_answer_of_nvidia_smi_is_not_no_process(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        if failure == "missing":
            raise FileNotFoundError
        if failure == "hangs":
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=9, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert nvidia_smi.compute_processes() is None
    assert nvidia_smi.driver_version() == ""


@pytest.mark.parametrize(
    "answer, error",
    [
        (subprocess.TimeoutExpired("python", 1), "did not answer within"),
        (SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: libfoo\n"),
         "fails: ImportError: libfoo"),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "fails: exit code -11"),
    ],
)  # fmt: skip
def test_a_torch_that_hangs_or_crashes(answer: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    assert error in torch_probe.ask()["error"]


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"torch.py": "raise RuntimeError('a module of the working directory')"})
    monkeypatch.chdir(tmp_path)
    machine = read_machine()
    import torch

    assert machine.torch["version"] == torch.__version__
    assert all(rate["up_gb_per_s"] > 0 for rate in machine.torch["rates"])
    assert machine.segment_error == ""
    names = {check.name for check in examine(machine)}
    assert {"shared memory", "host memory", "memlock", "torch", "cores", "/tmp", "kernel"} <= names


def test_the_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert rpctl.main(["doctor", "--help"]) == 0
    assert "usage: rpctl doctor" in capsys.readouterr().out
