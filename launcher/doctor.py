"""rpctl doctor: what of this machine would stop or slow a run, and how to mend it.

    rpctl doctor           a line for each check: ok, warning or problem, with the remedy
    rpctl doctor --json    for programs

Exit code 1 if something would stop a run. The checks are functions of a `Machine`; `launcher/readings.py` reads it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from launcher.readings import Machine, read_machine
from launcher.screen import write
from launcher.torch_probe import PROBE_BYTES
from rpruntime.store.limits import gib

OK, WARNING, PROBLEM = "ok", "warning", "problem"

SMALL_BYTES = 256 << 20
"""Below this not even a small model runs: every process's arena begins with 16 MiB, beside batches and weights."""
BYTES_A_PARAMETER = 18
"""Host memory of bf16 and AdamW (README, "Memory")."""
FEW_FILES, SOME_FILES = 128, 1024
SLOW_LINK_GB_PER_S = 8.0
"""Half of what 16 lanes of PCIe 3 move."""
TMP_BYTES = 16 << 20

_CONTAINER_SHM = {
    "docker": "`docker run --shm-size=...`, or `--ipc=host` to use the host's /dev/shm",
    "podman": "`podman run --shm-size=...`, or `--ipc=host` to use the host's /dev/shm",
    "kubernetes": "an emptyDir with medium Memory at /dev/shm",
    "": "`mount -o remount,size=... /dev/shm`",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `found` is what is there, `remedy` what to do about it ("": nothing)."""

    name: str
    verdict: str
    found: str
    remedy: str = ""


def doctor(words: list[str], read: Callable[[], Machine] = read_machine) -> int:
    """The command; returns the exit code: 1 if something would stop a run, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="rpctl doctor", description="Says what of this machine would stop a run.")
    parser.add_argument("--json", action="store_true", help="for programs")
    try:
        options = parser.parse_args(words)
    except SystemExit as end:  # --help, or an argument that there is not
        return int(end.code or 0)
    if not options.json:
        write(sys.stderr, "rpctl doctor: looking at the machine, its copies are measured ...\n")
    checks = examine(read())
    if options.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        for check in checks:
            print(f"{check.verdict:<8} {check.name:<14} {check.found}" + (f". {check.remedy}" if check.remedy else ""))
        counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in (PROBLEM, WARNING)}
        print(f"{counts[PROBLEM]} that would stop a run, {counts[WARNING]} to know of")
    return int(any(check.verdict == PROBLEM for check in checks))


def examine(machine: Machine) -> list[Check]:
    """All checks, in the order in which they are printed."""
    return [check for look in _LOOKS for check in look(machine)]


# --- memory


def _shared_memory(machine: Machine) -> Iterator[Check]:
    name, memory = "shared memory", machine.memory
    enlarge = f"Enlarge it: {_CONTAINER_SHM[machine.container]}"
    if memory is None:
        yield Check(name, PROBLEM, "/dev/shm is not there", "Mount a tmpfs: `mount -t tmpfs tmpfs /dev/shm`")
        return
    found = f"/dev/shm has {gib(memory.shm_free)} free of {gib(memory.shm_total)}"
    if machine.segment_error:
        yield Check(name, PROBLEM, f"{found}, but making a segment fails: {machine.segment_error}", enlarge)
    elif memory.shm_free < SMALL_BYTES:
        yield Check(name, PROBLEM, f"{found}, too little for any model", enlarge)
    elif memory.shm_total < memory.ram_total // 3:
        yield Check(name, WARNING, f"{found}, a small part of {gib(memory.ram_total)} RAM: it limits models", enlarge)
    else:
        yield Check(name, OK, found)


def _host_memory(machine: Machine) -> Iterator[Check]:
    memory = machine.memory
    if memory is None:
        return
    name, room, which = "host memory", *memory.available()
    limit = "no cgroup limit"
    if memory.cgroup_limit is not None:
        limit = f"{gib(memory.cgroup_free or 0)} free of the cgroup's {gib(memory.cgroup_limit)}"
    found = f"RAM {gib(memory.ram_available)} available of {gib(memory.ram_total)}, {limit}"
    figure = {"shm": "/dev/shm", "cgroup": "the cgroup", "ram": "RAM"}[which]
    found += f"; {figure} allows {gib(room)}, about {room / BYTES_A_PARAMETER / 1e9:.2g} G parameters (bf16, AdamW)"
    remedies = {
        "cgroup": "Raise the container's limit: `docker run --memory=...`, a pod's limits.memory, systemd's MemoryMax=",
        "ram": "End what uses it; where the reading is wrong (a virtual machine that grows): `--host-memory GIB`",
    }
    if which != "shm" and room < SMALL_BYTES:
        yield Check(name, PROBLEM, found, remedies[which])
    elif which == "cgroup" and memory.cgroup_limit is not None and memory.cgroup_limit < memory.ram_total // 3:
        yield Check(name, WARNING, found, remedies[which])
    else:
        yield Check(name, OK, found)


def _memlock(machine: Machine) -> Iterator[Check]:
    soft, hard = machine.memlock
    found = f"`ulimit -l` is {_limit(soft, gib)}"
    if soft == resource.RLIM_INFINITY or not machine.gpus:
        yield Check("memlock", OK, found + ("" if machine.gpus else ", which only GPUs need"))
        return
    raise_it = "`ulimit -l unlimited`" if hard == resource.RLIM_INFINITY else "A line in /etc/security/limits.conf"
    if machine.container in ("docker", "podman"):
        raise_it = f"`{machine.container} run --ulimit memlock=-1`"
    refused = any("refused to pin" in rate.get("error", "") for rate in machine.torch.get("rates", ()))
    if refused:
        yield Check("memlock", PROBLEM, f"{found}, and pinning {gib(PROBE_BYTES)} was refused", raise_it)
    elif soft < PROBE_BYTES and any("up_gb_per_s" in rate for rate in machine.torch.get("rates", ())):
        yield Check("memlock", OK, f"{found}, but this driver pins beyond it ({gib(PROBE_BYTES)} tried)")
    else:
        yield Check("memlock", WARNING, f"{found}: CUDA may refuse to pin more", raise_it)


def _limit(value: int, text: Callable[[int], str]) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else text(value)


# --- devices


def _gpus(machine: Machine) -> Iterator[Check]:
    if not machine.gpus:
        yield Check("GPUs", OK, "none (or no driver): runs use cpu devices, for trying things out")
        return
    kinds = dict.fromkeys((gpu.name, gpu.memory_bytes) for gpu in machine.gpus)
    listed = ", ".join(
        f"{sum((gpu.name, gpu.memory_bytes) == kind for gpu in machine.gpus)} x {kind[0]} {gib(kind[1])}"
        for kind in kinds
    )
    yield Check("GPUs", OK, f"{listed}, driver {machine.driver or 'unknown'}")
    if machine.processes is None:
        yield Check("GPU users", WARNING, "unknown, as nvidia-smi does not answer", "Try `nvidia-smi` by hand")
        return
    ours = {pid: name for name, pids in machine.sessions.items() for pid in pids}
    for process in machine.processes:
        index = next((str(i) for i, gpu in enumerate(machine.gpus) if gpu.uuid == process.uuid), process.uuid)
        whose = f"session {ours[process.pid]}" if process.pid in ours else process.name or "another process"
        held = f"GPU {index}: {gib(process.memory_bytes)} held by {whose} (pid {process.pid})"
        remedy = f"`rpctl stop {ours[process.pid]}`" if process.pid in ours else "Wait for it, end it"
        yield Check("GPU users", WARNING, held, f"{remedy}, or choose others with --devices")
    if not machine.processes:
        yield Check("GPU users", OK, "nobody else is on a GPU, as far as the driver shows")


def _torch(machine: Machine) -> Iterator[Check]:
    build, (least, below) = machine.torch, machine.torch_range
    wanted = f'pip install "torch>={least},<{below}"'
    if "version" not in build:
        yield Check("torch", PROBLEM, build.get("error", "no answer"), f"Install it anew: `{wanted}`")
        return
    version, cuda = build["version"], build["cuda"]
    wants_gpus = machine.config is not None and any(name.startswith("cuda") for name in machine.config["devices"])
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'a CPU build'}"
    if not _numbers(least) <= _numbers(version) < _numbers(below):
        yield Check("torch", PROBLEM, f"{found}; {least} up to, not including, {below} is needed", f"`{wanted}`")
    elif wants_gpus and not cuda:
        remedy = f"Install a CUDA build: `{wanted}` from an index that has one, or use --devices cpu:2"
        yield Check("torch", PROBLEM, f"{found}, which cannot use this machine's GPUs", remedy)
    elif wants_gpus and not build["available"]:
        found += f", but it can use no GPU: {build['error'] or 'it gives no reason'}"
        yield Check("torch", PROBLEM, found, "Update the driver, or install a build of torch for it")
    else:
        yield Check("torch", OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13, 0)."""
    words = version.split("+")[0].split(".")
    return tuple(int("".join(c for c in word if c.isdigit()) or 0) for word in words[:3])


def _rates(machine: Machine) -> Iterator[Check]:
    for rate in machine.torch.get("rates", ()):
        name = "copies" if rate["device"] == "cpu" else "PCIe"
        if "error" in rate:
            remedy = "See memlock above" if "refused to pin" in rate["error"] else "Try `nvidia-smi`, or another GPU"
            yield Check(name, PROBLEM, f"{rate['device']} cannot be used: {rate['error']}", remedy)
            continue
        up, down = rate["up_gb_per_s"], rate["down_gb_per_s"]
        if rate["device"] == "cpu":
            yield Check(name, OK, f"{up:.0f} GB/s from host memory to host memory, on one core or more")
            continue
        found = f"{rate['device']}: {up:.0f} GB/s up, {down:.0f} GB/s down, from pinned memory"
        if min(up, down) < SLOW_LINK_GB_PER_S:
            remedy = (
                "Larger or more micro-batches hide it; look for a slot with more lanes (`nvidia-smi -q`, Link Width)"
            )
            yield Check(name, WARNING, f"{found}: slow", remedy)
        else:
            yield Check(name, OK, found)


def _cores(machine: Machine) -> Iterator[Check]:
    config = machine.config
    if config is None:
        yield Check("devices", PROBLEM, machine.config_error)
        return
    workers = len(config["devices"])
    found = (
        f"{machine.cores} usable; {workers} workers with {config['threads_per_worker']} threads each "
        f"({', '.join(config['devices'])}), optimizer with {config['optimizer_threads']}"
    )
    if machine.cores <= workers:
        remedy = "Give the container or job more cores (`docker run --cpus`, taskset), or use fewer devices"
        yield Check("cores", WARNING, f"{found}: workers and optimizer wait for each other", remedy)
    else:
        yield Check("cores", OK, found)


# --- the system


def _open_files(machine: Machine) -> Iterator[Check]:
    soft, hard = machine.open_files
    found = f"`ulimit -n` is {_limit(soft, str)}"
    verdict = OK
    if soft != resource.RLIM_INFINITY and soft < SOME_FILES:
        verdict = PROBLEM if soft < FEW_FILES else WARNING
        found += ": each process, segment and client takes a few"
    remedy = f"`ulimit -n {_limit(hard, str)}`" if verdict != OK else ""
    yield Check("open files", verdict, found, remedy)


def _sessions(machine: Machine) -> Iterator[Check]:
    if machine.sessions:
        yield Check(
            "sessions",
            WARNING,
            f"{', '.join(sorted(machine.sessions))} of yours run and have their share of memory, cores and GPUs",
            "`rpctl status` shows them, `rpctl stop NAME` ends one",
        )
    else:
        yield Check("sessions", OK, "none of yours is running")
    if machine.leftovers:
        yield Check("leftovers", WARNING, f"of dead sessions: {', '.join(machine.leftovers)}", "`rpctl clean`")
    else:
        yield Check("leftovers", OK, "nothing of dead sessions")


def _temporary(machine: Machine) -> Iterator[Check]:
    found = machine.temporary
    if found.problem:
        yield Check("/tmp", PROBLEM, found.problem, "Remove it or have its owner do so: session folders are there")
    elif not found.writable:
        yield Check(
            "/tmp", PROBLEM, "not writable", "`chmod 1777 /tmp`: session folders are there, whatever TMPDIR says"
        )
    elif found.free_bytes < TMP_BYTES:
        yield Check("/tmp", PROBLEM, f"only {gib(found.free_bytes)} free", "Make room: logs and sockets lie there")
    elif found.noexec:
        remedy = "Nothing of ours runs from there; what compiles at run time (torch.compile) needs TMPDIR elsewhere"
        yield Check("/tmp", WARNING, "writable, but mounted noexec", remedy)
    else:
        yield Check("/tmp", OK, f"writable, {gib(found.free_bytes)} free")


def _kernel(machine: Machine) -> Iterator[Check]:
    if machine.has_pidfd:
        yield Check("kernel", OK, "pidfd is there")
    else:
        remedy = "Linux 5.3 or newer, or a container whose seccomp profile allows pidfd_open"
        yield Check("kernel", WARNING, "no pidfd: the end of a process is found out by asking", remedy)


def _logout(machine: Machine) -> Iterator[Check]:
    logout = machine.logout
    if logout is None:
        yield Check("logout", OK, "no systemd here that would end processes")
        return
    ipc = "RemoveIPC does no harm, as segments have no names" if logout.removes_ipc else "RemoveIPC is off"
    if not logout.kills_processes:
        yield Check("logout", OK, f"a run outlives the logout (KillUserProcesses=no); {ipc}")
        return
    scope = "`systemd-run --user --scope rplaunch ...`"
    if logout.lingers:
        yield Check("logout", WARNING, f"systemd ends this login's processes with it; {ipc}", f"Start it with {scope}")
    else:
        remedy = f"`loginctl enable-linger {logout.user}`, then start it with {scope}"
        yield Check("logout", WARNING, f"systemd ends your processes when you log out; {ipc}", remedy)


def _container(machine: Machine) -> Iterator[Check]:
    if not machine.container:
        return
    found = f"{machine.container}; its limits on memory, /dev/shm, cores and memlock are the figures above"
    yield Check("container", OK, f"{found}. Processes share memory by descriptors, so --ipc can stay private")


_LOOKS: tuple[Callable[[Machine], Iterator[Check]], ...] = (
    _shared_memory, _host_memory, _memlock, _gpus, _torch, _rates, _cores, _open_files, _sessions, _temporary, _kernel,
    _logout, _container,
)  # fmt: skip
