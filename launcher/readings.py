"""What `rpctl doctor` knows of the machine, as plain data. Readers take the root of the file system, for tests.

Nothing is changed here, and no GPU gets a context but in the probe's own process.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import pwd
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import nvidia_smi, torch_probe
from launcher.devices import Gpu, probe_gpus, usable_cores
from launcher.nvidia_smi import GpuProcess
from launcher.plan import make_plan
from launcher.session import base_candidates, folder_problem, is_alive, is_leftover, list_sessions, read_session
from rpruntime import flags
from rpruntime.errors import ConfigError, HostMemoryError
from rpruntime.store.limits import HostMemory, read_host_memory

Limit = tuple[int, int]
"""Soft and hard limit; `resource.RLIM_INFINITY`: none."""


@dataclass(frozen=True, slots=True)
class Temporary:
    """The folder of session folders, /tmp. `problem`: why no session can be made in it."""

    writable: bool = True
    noexec: bool = False
    free_bytes: int = 1 << 40
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Logout:
    """What systemd does when the user's last session ends."""

    user: str
    kills_processes: bool = False
    removes_ipc: bool = True
    lingers: bool = False


@dataclass(frozen=True)
class Machine:
    """One machine as the checks see it.

    Attributes:
        memory: None: /dev/shm cannot be read.
        gpus: all of the machine's, whatever CUDA_VISIBLE_DEVICES says.
        processes: with a context on a GPU; None: not known.
        config: what `rplaunch` would start without flags; None: `config_error` says why it would not.
        torch: what `torch_probe.ask` gave.
        torch_range: (least, below) versions that the package asks for.
        sessions: living ones of this user, with their processes' ids.
        leftovers: dead ones that `rpctl clean` would remove.
        segment_error: why no shared memory can be made; "": it can.
        logout: None: no systemd.
        container: "docker", "podman", "kubernetes"; "": none.
    """

    memory: HostMemory | None
    memlock: Limit
    open_files: Limit
    cores: int
    torch: dict[str, Any]
    torch_range: tuple[str, str] = ("0", "99")
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    processes: tuple[GpuProcess, ...] | None = ()
    config: dict[str, Any] | None = None
    config_error: str = ""
    sessions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    temporary: Temporary = Temporary()
    has_pidfd: bool = True
    segment_error: str = ""
    logout: Logout | None = None
    container: str = ""


def read_machine(root: Path = Path("/"), ask_torch: Callable[[], dict[str, Any]] = torch_probe.ask) -> Machine:
    """Read everything; takes some seconds, for torch."""
    gpus = probe_gpus()
    config, config_error = _config()
    return Machine(
        memory=_memory(root),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        cores=usable_cores(),
        torch_range=torch_range(),
        gpus=gpus,
        driver=nvidia_smi.driver_version() if gpus else "",
        processes=nvidia_smi.compute_processes() if gpus else (),
        config=config,
        config_error=config_error,
        sessions=_sessions(),
        leftovers=tuple(path.name for path in list_sessions() if is_leftover(path)),
        temporary=read_temporary(root / "tmp"),
        has_pidfd=_has_pidfd(),
        segment_error=_segment_error(),
        logout=read_logout(root, _user()),
        container=read_container(root),
        torch=ask_torch(),  # last, as its own contexts are nobody's to see
    )


def _memory(root: Path) -> HostMemory | None:
    try:
        return read_host_memory(root)
    except OSError:
        return None


def _config() -> tuple[dict[str, Any] | None, str]:
    try:
        return make_plan(flags.settings({}), []).config, ""
    except ConfigError as err:
        return None, str(err)


def torch_range() -> tuple[str, str]:
    """The versions of torch that this package asks for: (least, below)."""
    try:
        wanted = importlib.metadata.requires("rpruntime") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, never installed
        return "0", "99"
    line = next((entry for entry in wanted if re.match(r"torch\b(?!\w)", entry)), "")
    least, below = re.search(r">=([\d.]+)", line), re.search(r"<([\d.]+)", line)
    return (least[1] if least else "0"), (below[1] if below else "99")


def _sessions() -> dict[str, tuple[int, ...]]:
    found = {}
    for path in list_sessions():
        body = read_session(path) if is_alive(path) else None
        if body is not None:
            pids = [body["launcher"]["pid"], body["script"].get("pid"), *(r["pid"] for r in body["roles"].values())]
            found[path.name] = tuple(pid for pid in pids if pid)
    return found


def read_temporary(folder: Path) -> Temporary:
    """What `folder` is like for session folders."""
    try:
        stat = os.statvfs(folder)
    except OSError as err:
        return Temporary(writable=False, problem=f"{folder} cannot be read: {err.strerror}")
    candidates = [folder / path.name for path in base_candidates()]
    problems = [folder_problem(path) for path in candidates if path.exists() or path.is_symlink()]
    problem = problems[0] if len(problems) == len(candidates) and all(problems) else None
    return Temporary(
        writable=os.access(folder, os.W_OK | os.X_OK),
        noexec=bool(stat.f_flag & os.ST_NOEXEC),
        free_bytes=stat.f_frsize * stat.f_bavail,
        problem=problem or "",
    )


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _segment_error() -> str:
    """Make a page of shared memory as a session does, and drop it."""
    from rpruntime.store.segments import make_segment

    try:
        os.close(make_segment(4096, read_host_memory))
    except HostMemoryError as err:
        return str(err)
    except Exception as err:  # posix_ipc has errors of its own
        return f"{type(err).__name__}: {err}"
    return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def read_logout(root: Path, user: str) -> Logout | None:
    """systemd-logind's settings; None where systemd does not run."""
    if not (root / "run/systemd/system").exists():
        return None
    values = {"killuserprocesses": "no", "removeipc": "yes"}
    places = [root / place for place in ("usr/lib/systemd", "etc/systemd", "run/systemd")]
    files = [place / "logind.conf" for place in places]
    drop_ins = {path.name: path for place in places for path in sorted((place / "logind.conf.d").glob("*.conf"))}
    for path in [*files, *(drop_ins[name] for name in sorted(drop_ins))]:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        try:
            parser.read_string(path.read_text())
        except (OSError, configparser.Error):
            continue
        if parser.has_section("Login"):
            values |= {key: value for key, value in parser.items("Login") if key in values and value}
    yes = ("yes", "true", "on", "1")
    return Logout(
        user,
        kills_processes=values["killuserprocesses"].lower() in yes,
        removes_ipc=values["removeipc"].lower() in yes,
        lingers=(root / "var/lib/systemd/linger" / user).exists(),
    )


def read_container(root: Path, environ: Any = os.environ) -> str:
    """Which kind of container this process is in; "": none that shows."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else ""
