"""What `pipe.trace` returns: a trace that is being taken, from the script's side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rpruntime.trace.recording import Recording
from rpruntime.trace.report import Report

if TYPE_CHECKING:
    from rpruntime.client import Client


class Trace:
    """A trace. In a `with` block it ends with the block; else with `stop`, its steps, or the session.

    Attributes:
        path: of the file, once it is written.
    """

    def __init__(self, client: Client, recording: Recording) -> None:
        self._client = client
        self._recording = recording
        self.path: Path = recording.path

    def done(self) -> bool:
        """Whether the file is written."""
        return self._recording.is_written()

    def stop(self) -> list[Report]:
        """End it, if it has not ended, and wait for the file.

        Returns, for each model of which it holds a whole iteration, where the devices' time went and what the simulator
        says of the same plan and times.
        """
        with self._client.lock:
            self._client.observer.end(self._recording)
        self._recording.wait()
        return self._recording.reports

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
