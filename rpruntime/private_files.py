"""Files of a session's folder that only its user reads, and never sees half written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole; mode 0600. Raises OSError: it is as it was, and nothing is left beside it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
