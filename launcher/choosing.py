"""What the commands of rpctl share: refusing, flags, and which session is meant."""

from __future__ import annotations

from pathlib import Path

from launcher.session import is_alive, list_sessions, read_session


class Refused(Exception):
    """A sentence for the user and an exit code."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def take_flags(words: list[str], known: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """The flags among words, and the other words.

    Raises:
        Refused: a flag that is not known.
    """
    given = {word for word in words if word.startswith("-")}
    unknown = given - set(known)
    if unknown:
        raise Refused(f"unknown flag {sorted(unknown)[0]}", 2)
    return given, [word for word in words if word not in given]


def running_sessions() -> list[Path]:
    """Folders of the sessions that run."""
    return [path for path in list_sessions() if is_alive(path) and read_session(path) is not None]


def choose_session(name: str | None, folders: list[Path]) -> Path:
    """The one with this name, or the only one.

    Raises:
        Refused: there is none, or it is not clear which.
    """
    if name is not None:
        for path in folders:
            if path.name == name:
                return path
        raise Refused(f"no session {name}")
    if len(folders) != 1:
        names = ", ".join(path.name for path in folders)
        raise Refused(f"which session? {names}" if folders else "there is no session")
    return folders[0]
