"""Where a trace can be written. Light: the launcher asks before it starts anything."""

from __future__ import annotations

from pathlib import Path

from rpruntime.errors import ConfigError


def check_place(path: Path) -> None:
    """Raises ConfigError if no file can be written there; told before the run, not at its end."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"trace {path}: there is no folder {folder}")
    probe = folder / f".{path.name}.probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as err:
        raise ConfigError(f"trace {path}: nothing can be written in {folder} ({err.strerror})") from err
    if path.is_dir():
        raise ConfigError(f"trace {path} is a folder: name a file")
    if path.exists() and not path.is_file():  # the finished trace takes the place of what is there
        raise ConfigError(f"trace {path} is a device or a pipe, which a trace would replace: name a file")
