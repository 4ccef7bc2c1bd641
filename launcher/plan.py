"""What is to be launched: devices, roles, threads, folder. Light: the first line on screen waits for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rpruntime
from launcher.devices import Device, resolve_devices, usable_cores
from launcher.screen import Screen, devices_line, session_line
from launcher.session import SessionFolder, check_name, clean_sessions, create_session, make_base
from rpruntime.store.limits import read_host_memory
from rpruntime.trace.place import check_place


@dataclass(frozen=True)
class Plan:
    """What is to be launched, known before anything is started."""

    config: dict[str, Any]
    devices: tuple[Device, ...]

    @property
    def roles(self) -> tuple[tuple[str, Device | None], ...]:
        """Roles to start, with their devices."""
        if not self.devices:
            return ()
        workers = tuple((f"worker-{index}", device) for index, device in enumerate(self.devices))
        return (("optimizer", None), *workers)


def make_plan(settings: Mapping[str, Any], sys_path: list[str]) -> Plan:
    """Resolve devices and threads.

    Raises:
        ConfigError: there are no such devices, or a name or a place cannot be had.
    """
    check_name(settings["name"])
    if settings["trace"] is not None:
        check_place(Path(settings["trace"]))
    devices = resolve_devices(settings["devices"])
    cores, workers = usable_cores(), max(1, len(devices))
    on_cuda = any(device.is_cuda for device in devices)
    config = dict(settings)
    config["devices_flag"] = settings["devices"]
    config["devices"] = [device.name for device in devices]
    config["threads_per_worker"] = 4 if on_cuda else max(1, cores // workers)
    if config["optimizer_threads"] is None:
        config["optimizer_threads"] = max(1, cores - 2 * workers) if on_cuda else max(1, cores - workers)
    config["sys_path"] = sys_path
    return Plan(config, devices)


def begin_session(plan: Plan, screen: Screen, script: dict[str, Any]) -> SessionFolder:
    """Make the session's folder, clean what dead ones left, and say the first two lines.

    Raises:
        ConfigError: there is no place for it, or its name is taken.
    """
    base = make_base()
    if base.warning:
        screen.warn(f"rpruntime: {base.warning}")
    clean_sessions(base.path)
    folder = create_session(base.path, plan.config["name"], plan.config, script)
    screen.say(session_line(rpruntime.__version__, folder.name, folder.config["log_dir"]))
    screen.say(devices_line(plan.devices, read_host_memory()))
    return folder


def script_path_entry(target: str, module: bool) -> str:
    """What Python puts first on sys.path for this script."""
    return os.getcwd() if module else str(Path(os.path.realpath(target)).parent)
