"""The lines of log files, alike in every process:

12:00:01.123 worker-0 INFO [slot 12 layer 3] what happened
time         role     level what the process was doing, if it says, and the message
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

CONTROLLER = "controller"


class LineFormatter(logging.Formatter):
    """Lines of one role. `task` says what the process is doing; "" for nothing."""

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d {role} %(levelname)s %(task)s%(message)s", "%H:%M:%S")
        self.task: Callable[[], str] = lambda: ""

    def format(self, record: logging.LogRecord) -> str:
        task = self.task()
        record.task = f"[{task}] " if task else ""
        return super().format(record)


class ControllerLog:
    """The script's process has a log file too, `controller.log`, of what the logger "rpruntime" says.

    The script's own logging stays as it is: its handlers get what they would get without us, from the level that the
    script has set for our logger, else from its root's.

    Args:
        folder: of the session's logs.
        debug: debug lines too.
    """

    def __init__(self, folder: Path, *, debug: bool = False) -> None:
        self._logger = logging.getLogger("rpruntime")
        self._level = self._logger.level
        self._file = _PrivateFile(folder / f"{CONTROLLER}.log", delay=True, encoding="utf-8")
        self._file.setFormatter(LineFormatter(CONTROLLER))
        self._ours = logging.DEBUG if debug else logging.INFO
        self._file.setLevel(self._ours)
        self._pass_on = _PassOn(self._threshold)
        self._propagates = self._logger.propagate
        self._logger.propagate = False
        for handler in (self._file, self._pass_on):
            self._logger.addHandler(handler)
        self._logger.setLevel(min(self._ours, self._level or self._ours))
        self._set = self._logger.level

    def _threshold(self) -> int:
        """From which level on the script's handlers want to hear of us."""
        level = self._logger.level
        if level != self._set:  # the script has changed it since
            return level or logging.getLogger().level
        return self._level or logging.getLogger().level

    def close(self) -> None:
        """Leave the logger as it was."""
        for handler in (self._file, self._pass_on):
            self._logger.removeHandler(handler)
        self._file.close()
        self._logger.propagate = self._propagates
        if self._logger.level == self._set:
            self._logger.setLevel(self._level)


class _PassOn(logging.Handler):
    """To the root's handlers, as propagation would."""

    def __init__(self, threshold: Callable[[], int]) -> None:
        super().__init__()
        self._threshold = threshold

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        if record.levelno >= self._threshold():
            root.callHandlers(record)


class _PrivateFile(logging.FileHandler):
    """Only its user may read it, as all logs of a session."""

    def _open(self):  # the class of the stream is logging's own affair
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return open(fd, self.mode, encoding=self.encoding)
