"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from rpruntime.private_files import write_private


def test_a_file_is_replaced_as_a_whole_and_only_its_user_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"second, longer", b""):
        write_private(path, data)
        assert path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_one_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, b"first")

    def refuse(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_private(path, b"second")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]
