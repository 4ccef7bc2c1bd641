"""Every flag once: the parser, `rp.init`, the variables and the help read this table.

A flag is given as `--max-restarts 3`, `--max-restarts=3`, `--max_restarts 3`, RPRUNTIME_MAX_RESTARTS=3 or
`rp.init(max_restarts=3)`; the command line comes before the variable, which comes before the default. No
abbreviations: a shortened flag is an error, so nothing of the script's can be taken for ours.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rpruntime.errors import ConfigError

VARIABLE_PREFIX = "RPRUNTIME_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `kind`: "text", "path" (made absolute), "count", "number" or "switch"; the help shows `metavar`."""

    name: str
    default: Any
    kind: str
    group: str
    help: str
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    least: int = 0
    """The smallest count."""

    @property
    def key(self) -> str:
        """Its name in Python."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return VARIABLE_PREFIX + self.key.upper()


FLAGS: tuple[Flag, ...] = (
    Flag("devices", "auto", "text", "devices", "auto, inline, cpu:N, cuda, cuda:0,1 or 0,1", "SPEC"),
    Flag(
        "optimizer-threads",
        None,
        "count",
        "devices",
        "threads of the optimizer process (default: by cores)",
        "N",
        least=1,
    ),
    Flag(
        "cpu-affinity",
        "off",
        "text",
        "devices",
        "numa: workers keep to the cores of their GPU's node",
        "off|numa",
        choices=("off", "numa"),
    ),
    Flag("device-memory", None, "number", "devices", "what a run may use of each GPU (default: all)", "GIB"),
    Flag("host-memory", None, "number", "devices", "RAM to count on where the reading is wrong", "GIB"),
    Flag("name", None, "text", "session", "name of the session (default: adjective-animal)", "NAME"),
    Flag("log-dir", None, "text", "session", "where the logs go (default: the session's folder)", "DIR"),
    Flag("shutdown-timeout", 10.0, "number", "session", "grace after SIGTERM, then everything is ended", "S"),
    Flag("max-restarts", 2, "count", "session", "a device's restarts in ten minutes, then it is retired", "N"),
    Flag("max-task-failures", 2, "count", "session", "deaths over one task until the run fails", "N", least=1),
    Flag("hang-timeout", 300.0, "number", "session", "no progress so long: the worker is killed; 0: never", "S"),
    Flag(
        "tee",
        "none",
        "text",
        "output",
        "logs to the terminal",
        "none|workers|all",
        "t",
        ("none", "workers", "all"),
    ),
    Flag("quiet", False, "switch", "output", "say nothing unless something fails", "", "q"),
    Flag("debug", False, "switch", "output", "our own lines in tracebacks, debug logs", ""),
    Flag("trace", None, "path", "output", "write a trace of the run at its end", "FILE"),
)
BY_KEY = {flag.key: flag for flag in FLAGS}
_BY_SHORT = {flag.short: flag for flag in FLAGS if flag.short}


class UsageError(ConfigError):
    """A command line that cannot be understood: exit code 2."""


@dataclass
class CommandLine:
    """A parsed command line: flags that were given, what to run, and its arguments."""

    given: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    help: bool = False
    version: bool = False
    module: bool = False
    target: str = ""
    arguments: list[str] = field(default_factory=list)


def parse(argv: list[str]) -> CommandLine:
    """Read our flags up to the script's name; everything after it is the script's, untouched.

    Raises:
        UsageError: an unknown flag, a missing or wrong value.
    """
    line = CommandLine()
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "-m" or (word.startswith("-m") and not word.startswith("--") and len(word) > 2):
            line.module = True
            if word != "-m":
                line.target = word[2:]
            elif position < len(argv):
                line.target = argv[position]
                position += 1
            else:
                raise UsageError("-m needs the name of a module")
            line.arguments = argv[position:]
            return line
        if word == "--":
            if position < len(argv):
                line.target, line.arguments = argv[position], argv[position + 1 :]
            return line
        if not word.startswith("-") or word == "-":
            line.target, line.arguments = word, argv[position:]
            return line
        if word in ("-h", "--help"):
            line.help = True
        elif word == "--version":
            line.version = True
        elif word.replace("_", "-") == "--dry-run":
            line.dry_run = True
        else:
            position = _take_flag(line, word, argv, position)
    return line


def _take_flag(line: CommandLine, word: str, argv: list[str], position: int) -> int:
    name, equals, value = word.partition("=")
    if name.startswith("--"):
        flag = BY_KEY.get(name[2:].replace("-", "_"))
    else:
        flag = _BY_SHORT.get(name[1:2])
        if flag is not None and len(name) > 2:  # -tall
            if flag.kind == "switch":
                flag = None
            else:
                equals, value = "=", word[2:].removeprefix("=")
    if flag is None:
        raise UsageError(f"unknown flag {name}{_suggestion(name)}")
    if flag.kind == "switch":
        line.given[flag.key] = convert(flag, value, name) if equals else True
        return position
    if not equals:
        if position >= len(argv):
            raise UsageError(f"{name} needs a value ({flag.metavar})")
        value = argv[position]
        position += 1
    line.given[flag.key] = convert(flag, value, name)
    return position


def _suggestion(name: str) -> str:
    known = ["--" + flag.name for flag in FLAGS] + ["--dry-run", "--help", "--version"]
    close = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    return f", did you mean {close[0]}?" if close else " (the script's own flags go after its name)"


def convert(flag: Flag, value: Any, said_as: str) -> Any:
    """A flag's value from text, or from Python's own types.

    Raises:
        UsageError: it does not fit; the message names it as `said_as`.
    """
    if value is None or value == "":
        return flag.default
    text = str(value).strip()
    try:
        if flag.kind == "count":
            number = int(text)
            if number < flag.least:
                raise ValueError
            return number
        if flag.kind == "number":
            real = float(text)
            if not 0 <= real < float("inf"):
                raise ValueError
            return real
        if flag.kind == "path":
            return os.path.abspath(os.path.expanduser(text))
        if flag.kind == "switch":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
    except (ValueError, KeyError):
        count = "a whole number" + (f" from {flag.least} on" if flag.least else "")
        wanted = {"count": count, "number": "a number", "switch": "1 or 0"}[flag.kind]
        raise UsageError(f"{said_as} {value!r}: {wanted} is needed") from None
    if flag.choices and text not in flag.choices:
        raise UsageError(f"{said_as} {value!r}: one of {', '.join(flag.choices)} is needed")
    return text


def settings(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """All flags' values: given, else by variable, else the default."""
    values = {}
    for flag in FLAGS:
        if flag.key in given:
            values[flag.key] = given[flag.key]
        else:
            values[flag.key] = convert(flag, environ.get(flag.variable), flag.variable)
    return values


def from_python(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `rp.init`, checked; None means not given.

    Raises:
        ConfigError: there is no such flag, or its value does not fit.
    """
    given = {}
    for key, value in flags.items():
        flag = BY_KEY.get(key)
        if flag is None:
            close = difflib.get_close_matches(key, BY_KEY, 1)
            raise ConfigError(f"rp.init has no argument {key!r}" + (f", did you mean {close[0]!r}?" if close else ""))
        if value is not None:
            try:
                given[key] = convert(flag, value, f"rp.init({key}=...)")
            except UsageError as err:
                raise ConfigError(str(err)) from None
    return given


def to_command_line(given: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [f"--{BY_KEY[key].name}={int(value) if isinstance(value, bool) else value}" for key, value in given.items()]


def help_text() -> str:
    """The help: one screen."""
    lines = [
        "usage: rplaunch [flags] script.py [arguments]      rplaunch [flags] -m module [arguments]",
        "",
        "  rplaunch train.py --epochs 3               every GPU (or two cpu devices)",
        "  rplaunch --devices cuda:0,1 train.py       these two",
        "  rplaunch --dry-run train.py                devices, memory and what would start",
        "",
        "The script runs once. Flags come before its name; all after it is the script's.",
    ]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        lines += ["", f"{group}:"]
        lines += [_help_line(flag) for flag in FLAGS if flag.group == group]
    lines += [
        f"  {'--dry-run, --version, -h/--help':<34}",
        "",
        "exit code: the script's; 128+n if signal n ended it; 130 after Ctrl-C; 1 if devices cannot be had;",
        "           2 for a wrong command line or a missing script.  Watch: rpctl top, rpctl logs -f",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _help_line(flag: Flag) -> str:
    name = (f"-{flag.short}, " if flag.short else "") + f"--{flag.name} {flag.metavar}".rstrip()
    default = "" if flag.default in (None, False) else f" ({flag.default:g})" if flag.kind == "number" else ""
    if not default and flag.default not in (None, False):
        default = f" ({flag.default})"
    return f"  {name:<28} {flag.help + default:<58} {flag.variable}"
