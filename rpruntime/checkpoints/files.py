"""Checkpoints on disk: what lies in the folder, how it is written whole or not at all, how it is checked.

    FOLDER/step-120/              complete: the name is given last, after everything is on the disk
        checkpoint.json           step, date, parameters, and of each file its size, CRC-32 and tensors
        unit-00003.safetensors    a storage unit's fp32 weights, under their names, and its optimizer state
        frozen-, previous-, buffers.safetensors, script.pt, optimizer.pt
    FOLDER/.step-130.partial      being written, or left by a process that was killed
    FOLDER/.step-120.old          being removed, or replaced by a save of the same step

Listing needs neither torch nor safetensors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpruntime.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = 1
META = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.(partial|old)")
_CHUNK_BYTES = 16 << 20
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError)
"""What reading entries raises where `checkpoint.json` is JSON but not as it was written."""
_STARTED = time.time()
"""Before it, this run wrote nothing."""
_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
Place = tuple[str, str, str]
"""(kind, parameter or layer, name of the state or buffer)"""


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder. `reason`: why it is not complete ("": it is); `date` in seconds since 1970."""

    path: Path
    step: int
    reason: str
    nbytes: int
    date: float

    @property
    def complete(self) -> bool:
        """Whether it can be loaded, as far as sizes tell."""
        return not self.reason


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints in a folder, oldest first, complete or not. Raises OSError."""
    found = []
    for path in sorted(Path(folder).iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        reason = "not complete: its writing did not end" if match[3] == "partial" else ""
        date = path.stat().st_mtime
        if not reason:
            try:
                date = float(read_meta(path)["date"])
            except CheckpointError as err:
                reason = str(err)
        found.append(Found(path, int(match[1] or match[2]), reason, nbytes, date))
    names = {entry.path.name for entry in found if entry.complete}
    found = [e for e in found if not (e.path.suffix == ".old" and f"step-{e.step}" in names)]  # it has been replaced
    return sorted(found, key=lambda entry: (entry.date, entry.step))


def find_checkpoint(folder: str | os.PathLike[str]) -> tuple[Path, list[Found]]:
    """The checkpoint to load: `folder` itself, or the newest complete one in it; and newer ones that are not complete.

    Raises CheckpointError: there is none, with the reasons.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder of checkpoints")
    if (path / META).exists() or _NAME.fullmatch(path.name):
        return path, []
    found = list_checkpoints(path)
    complete = [entry for entry in found if entry.complete]
    if not complete:
        reasons = "".join(f"; {entry.reason}" for entry in found)
        raise CheckpointError(f"{path} holds no complete checkpoint{reasons}")
    return complete[-1].path, [entry for entry in found[found.index(complete[-1]) :] if not entry.complete]


def read_meta(path: Path) -> dict[str, Any]:
    """`checkpoint.json`, with every file's size checked. Raises CheckpointError with the reason."""
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text())
        assert isinstance(meta, dict)
    except FileNotFoundError as err:
        raise CheckpointError(f"{path} is not complete: it has no {META}") from err
    except (OSError, ValueError, AssertionError) as err:
        raise CheckpointError(f"{path / META} cannot be read: {err}") from err
    if meta.get("format") != FORMAT:  # refused when it is loaded, with the reason
        date = meta.get("date")
        return {**meta, "date": date if isinstance(date, int | float) else 0.0, "files": {}}
    if meta.get("sum") != _sum_of(meta):
        raise CheckpointError(f"{path} is damaged: the contents of {META} do not fit its sum")
    try:
        float(meta["date"]), int(meta["step"])
        for name, entry in meta["files"].items():
            file = path / name
            size = file.stat().st_size if file.is_file() else -1
            if size != entry["bytes"]:
                what = "is missing" if size < 0 else f"is {size} bytes long instead of {entry['bytes']}"
                raise CheckpointError(f"{path} is damaged: {name} {what}")
    except _MALFORMED as err:
        raise _malformed(path, err) from err
    return meta


def _malformed(path: Path, err: Exception) -> CheckpointError:
    return CheckpointError(f"{path / META} cannot be read: {type(err).__name__}: {err}")


def at(moment: str) -> None:
    """Named moments of a save; tests end the process there."""


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Be the only one that writes checkpoints into a folder: two runs would take each other's files away.

    Raises:
        CheckpointError: another process, or another pipe of this one, is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise CheckpointError(
                "another run is writing a checkpoint there at this moment: give each run a folder of its own"
            ) from err
        yield
    finally:
        os.close(fd)


class CheckpointWriter:
    """Writes `folder/step-N` under another name; nothing is there under that name until `finish`.

    Raises OSError from every method; `explain` has words for it.
    """

    def __init__(self, folder: Path, step: int, progress: Callable[[int], None]) -> None:
        self.folder, self.step = folder, step
        self.path = folder / f"step-{step}"
        self._partial = folder / f".step-{step}.partial"
        self._progress = progress
        self._written = 0
        self.files: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not (self.path / META).exists():
            raise CheckpointError(f"{self.path} is there already and is no checkpoint")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()
        at("begun")

    def write_tensors(self, name: str, tensors: dict[str, tuple[Place, torch.Tensor]]) -> None:
        """A safetensors file of tensors by key; each is found again by its place."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        entries: dict[str, Any] = {}
        ordered = sorted(tensors.items(), key=lambda item: (-item[1][1].element_size(), item[0]))
        offset = 0
        for key, (place, tensor) in ordered:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            entries[key] = {"place": list(place), "dtype": dtype, "shape": shape}
            known = _SAFETENSORS_DTYPES.get(dtype)
            end = offset + tensor.nbytes
            header[key] = {
                "dtype": known or "U8",
                "shape": shape if known else [tensor.nbytes],
                "data_offsets": [offset, end],
            }
            offset = end
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        self._write(name, self._chunks(head, [tensor for _, (_, tensor) in ordered]))
        self.files[name]["tensors"] = entries

    @staticmethod
    def _chunks(head: bytes, tensors: list[torch.Tensor]) -> Iterator[Any]:
        import torch

        yield struct.pack("<Q", len(head)) + head
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data

    def write_bytes(self, name: str, data: bytes) -> None:
        """A file of bytes."""
        self._write(name, [memoryview(data)])

    def _write(self, name: str, chunks: Any) -> None:
        crc = nbytes = 0
        with open(self._partial / name, "wb", buffering=0) as file:
            for chunk in chunks:
                for start in range(0, len(chunk), _CHUNK_BYTES):
                    part = chunk[start : start + _CHUNK_BYTES]
                    crc = zlib.crc32(part, crc)
                    nbytes += len(part)
                    done = 0
                    while done < len(part):
                        done += file.write(part[done:])
                    self._written += len(part)
                    self._progress(self._written)
            at(f"wrote {name}")
            os.fsync(file.fileno())
        self.files[name] = {"bytes": nbytes, "crc32": crc}

    def link(self, name: str, source: Path, entry: dict[str, Any]) -> bool:
        """Use a file of an older checkpoint again; False: it cannot be linked."""
        try:
            if source.stat().st_size != entry["bytes"]:
                return False
            os.link(source, self._partial / name)
        except OSError:
            return False
        self.files[name] = entry
        return True

    def finish(self, meta: dict[str, Any]) -> Path:
        """Give the checkpoint its name; from now on it is complete."""
        meta = {"format": FORMAT, "step": self.step, "date": time.time(), **meta, "files": self.files}
        meta = json.loads(json.dumps(meta))  # as it will be read
        text = json.dumps({**meta, "sum": _sum_of(meta)})
        files = self.files.copy()
        self._write(META, [memoryview(text.encode())])
        self.files = files
        sync_folder(self._partial)
        at("synced")
        old = self.folder / f".step-{self.step}.old"
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
            at("moved the old one")
        self._partial.rename(self.path)
        at("renamed")
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return self.path

    def abandon(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self._partial, ignore_errors=True)


def prune(folder: Path, keep: int, newest: Path) -> None:
    """Keep so many complete checkpoints, `newest` among them; remove what older removals and killed runs have left.

    Call it within `writing_in`.
    """
    found = [entry for entry in list_checkpoints(folder) if not entry.path.name.startswith(".")]
    complete = [entry.path for entry in found if entry.complete and entry.path != newest]
    for path in complete[: max(0, len(complete) + 1 - keep)]:
        doomed = folder / f".{path.name}.old"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        at("renamed a doomed one")
    for path in folder.glob(".step-*.old"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*.partial"):
        if path.stat().st_mtime < _STARTED:
            shutil.rmtree(path, ignore_errors=True)


def _sum_of(meta: dict[str, Any]) -> int:
    """CRC-32 of what `checkpoint.json` says, besides the sum itself."""
    return zlib.crc32(json.dumps({k: v for k, v in meta.items() if k != "sum"}, sort_keys=True).encode())


def sync_folder(folder: Path) -> None:
    """Let the disk know what a folder holds by now."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(err: BaseException, folder: Path) -> str:
    """Why a checkpoint could not be written, in words."""
    if not isinstance(err, OSError):
        return f"{type(err).__name__}: {err}"
    what = err.strerror or str(err)
    if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{what}{f': {err.filename}' if err.filename else ''}"
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full ({what})"
    else:
        what = f"a file may not become so large: the disk is full or limited ({what})"
    try:
        free = f"; {shutil.disk_usage(folder).free / 2**20:.1f} MiB are free there"
    except OSError:
        free = ""
    return f"{what}{f': {err.filename}' if err.filename else ''}{free}"


class CheckpointReader:
    """A checkpoint that has been checked whole: format, sizes, sums. Raises CheckpointError with the reason."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta = read_meta(path)
        if self.meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {self.meta.get('format')!r} (written by rpruntime {self.meta.get('rpruntime')}); "
                f"this version reads format {FORMAT}"
            )
        self._places: dict[Place, tuple[str, str]] = {}
        self._files: dict[str, Any] = {}
        try:
            for name, entry in self.meta["files"].items():
                self._check(name, entry)
                for key, tensor in entry.get("tensors", {}).items():
                    self._places[tuple(tensor["place"])] = (name, key)
        except _MALFORMED as err:
            raise _malformed(path, err) from err

    def _check(self, name: str, entry: dict[str, Any]) -> None:
        crc = 0
        try:
            with open(self.path / name, "rb", buffering=0) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    crc = zlib.crc32(chunk, crc)
        except OSError as err:
            raise CheckpointError(f"{self.path / name} cannot be read: {err.strerror}") from err
        if crc != entry["crc32"]:
            raise CheckpointError(f"{self.path} is damaged: the bytes of {name} are not those that were written")

    def places(self, kind: str, of: str) -> list[Place]:
        """All tensors of a kind that a parameter or layer has."""
        return self._by_owner().get((kind, of), [])

    def _by_owner(self) -> dict[tuple[str, str], list[Place]]:
        found: dict[tuple[str, str], list[Place]] = {}
        if not hasattr(self, "_owners"):
            for place in self._places:
                found.setdefault(place[:2], []).append(place)
            self._owners = found
        return self._owners

    def has(self, place: Place) -> bool:
        """Whether there is such a tensor."""
        return place in self._places

    def tensor(self, place: Place) -> torch.Tensor:
        """A tensor, read now."""
        import torch
        from safetensors import safe_open

        name, key = self._places[place]
        if name not in self._files:
            self._files.clear()  # units follow each other: one file is open at a time
            self._files[name] = safe_open(self.path / name, framework="pt")
        entry = self.meta["files"][name]["tensors"][key]
        tensor: torch.Tensor = self._files[name].get_tensor(key)
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            tensor = tensor.view(getattr(torch, entry["dtype"])).reshape(entry["shape"])
        return tensor

    def objects(self, name: str) -> Any:
        """What a `.pt` file holds. Raises CheckpointError."""
        import torch

        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=False)
        except Exception as err:
            raise CheckpointError(f"{self.path / name} cannot be read: {type(err).__name__}: {err}") from err
