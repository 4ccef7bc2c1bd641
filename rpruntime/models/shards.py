"""Safetensors files, read straight into given memory and written tensor by tensor: no second copy of a shard.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [start, stop]}, "__metadata__": {..}}
    the rest  bytes of the tensors, row-major

A sharded model has an index beside its files: {"weight_map": {"name": "model-00001-of-00002.safetensors"}}.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpruntime.errors import ConfigError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
WINDOW_BYTES = 32 << 20
"""What is held of a file at a time where its dtype is not the wanted one."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `start`: its first byte, from the file's beginning."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read_into(self, target: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of the same shape, cast to its dtype.

        Raises:
            ConfigError: the file is cut.
        """
        flat = target.detach().view(-1)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start)
            if self.dtype == target.dtype:
                _read_fully(file, flat)
                return
            window = torch.empty(min(flat.numel(), WINDOW_BYTES // self.dtype.itemsize), dtype=self.dtype)
            for first in range(0, flat.numel(), max(1, window.numel())):
                part = window[: min(window.numel(), flat.numel() - first)]
                _read_fully(file, part)
                flat[first : first + part.numel()].copy_(part)


def _read_fully(file: Any, flat: torch.Tensor) -> None:
    if not flat.numel():
        return
    room = _bytes(flat)
    while room.nbytes:
        count = file.readinto(room)
        if not count:
            raise ConfigError(f"{file.name} is cut: it ends before the tensors that its header names")
        room = room[count:]


def _bytes(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def entries_of(folder: Path) -> dict[str, Entry] | None:
    """Every tensor of a folder's model by name; None: no safetensors there.

    Raises:
        ConfigError: a file is missing or broken, or holds a dtype that is not known here.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ConfigError(f"{index} is no index of safetensors files: {type(err).__name__}: {err}") from err
        files = [folder / str(name) for name in names]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        return None
    found: dict[str, Entry] = {}
    for file in files:
        found.update(_read_header(file))
    return found


def _read_header(path: Path) -> dict[str, Entry]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, row in header.items():
            if row["dtype"] not in DTYPES:
                raise ConfigError(
                    f"{name} in {path} is {row['dtype']}, a quantised or unknown format: load a checkpoint in "
                    "bfloat16, float16 or float32"
                )
            start, stop = row["data_offsets"]
            entry = Entry(path, 8 + length + start, tuple(row["shape"]), DTYPES[row["dtype"]])
            count = entry.dtype.itemsize
            for size in entry.shape:
                count *= size
            if count != stop - start:
                raise ValueError(f"{name} has {stop - start} bytes for shape {entry.shape}")
            found[name] = entry
        return found
    except FileNotFoundError as err:
        raise ConfigError(f"{path} is missing: the model's folder is not complete") from err
    except (ValueError, KeyError, TypeError, struct.error) as err:
        raise ConfigError(f"{path} is no safetensors file: {err}") from err


@dataclass(frozen=True)
class Row:
    """A tensor to be written; `make` is called when its turn has come, and what it returns is dropped afterwards."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def write(folder: Path, rows: Iterable[Row], *, max_shard_bytes: int) -> list[str]:
    """Write a model's tensors as `model.safetensors`, or as shards with their index. Returns the names of the files."""
    shards: list[list[Row]] = [[]]
    for row in rows:
        if shards[-1] and sum(r.nbytes for r in shards[-1]) + row.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(row)
    count = len(shards)
    if count == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard)
    if count > 1:
        index = {
            "metadata": {"total_size": sum(row.nbytes for shard in shards for row in shard)},
            "weight_map": {row.name: name for name, shard in zip(names, shards, strict=True) for row in shard},
        }
        names.append("model.safetensors.index.json")
        (folder / names[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


def cast_file(path: Path, dtype: torch.dtype) -> None:
    """Cast the floating tensors of a file, one at a time; what there was is replaced once the new one is complete."""

    def row(name: str, entry: Entry) -> Row:
        def read() -> torch.Tensor:
            value = torch.empty(entry.shape, dtype=entry.dtype)
            entry.read_into(value)
            return value

        return Row(name, entry.shape, dtype if entry.dtype.is_floating_point else entry.dtype, read)

    new = path.with_name(f".{path.name}.new")
    _write_file(new, [row(name, entry) for name, entry in _read_header(path).items()])
    new.replace(path)


def _write_file(path: Path, rows: list[Row]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for row in rows:
        if row.dtype not in _NAMES:
            raise ConfigError(f"{row.name} is {row.dtype}, which safetensors files do not hold")
        header[row.name] = {
            "dtype": _NAMES[row.dtype],
            "shape": list(row.shape),
            "data_offsets": [offset, offset + row.nbytes],
        }
        offset += row.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for row in rows:
            tensor = row.make().detach().to(row.dtype).contiguous()
            assert tuple(tensor.shape) == row.shape, f"{row.name} has shape {tuple(tensor.shape)}, not {row.shape}"
            if tensor.numel():
                file.write(_bytes(tensor.view(-1)))
        file.flush()
        os.fsync(file.fileno())
