"""Page-locking shared segments, so that copies run at full speed and beside compute."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rpruntime.errors import HostMemoryError
from rpruntime.store.allocator import SPAN_BYTES
from rpruntime.store.limits import memlock_problem

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = SPAN_BYTES
PAGE_BYTES = 4096

Register = Callable[[int, int], int]


def chunks(address: int, nbytes: int, limit: int = MAX_CHUNK_BYTES) -> list[tuple[int, int]]:
    """(address, bytes) of page-aligned calls of at most `limit` bytes that cover a mapping once."""
    assert address % PAGE_BYTES == 0, "mappings start at a page"
    end = address + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return [(first, min(limit, end - first)) for first in range(address, end, limit)]


def register(address: int, nbytes: int) -> int:
    """`cudaHostRegister`, portable; returns CUDA's code and clears the pending error after a refusal."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))
    if code:
        try:
            clear_error(load_runtime())
        except (OSError, AttributeError) as err:  # the refusal itself is what the user has to hear of
            log.warning("the pending CUDA error stays: %s", err)
    return code


def load_runtime() -> Any:
    """The CUDA runtime that torch has loaded; its functions are found through the library that depends on it.

    A second copy of the runtime would have errors of its own, so nothing is loaded here.

    Raises:
        OSError: this build of torch has no CUDA, or has not loaded it.
    """
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"), mode=os.RTLD_NOLOAD)


def clear_error(runtime: Any) -> int:
    """Take the calling thread's pending error from the runtime; returns its code, 0 for none.

    A refused call leaves one behind that torch would report at its next, innocent kernel. `cudaDeviceSynchronize` does
    not take it, and `torch.cuda.cudart()` has no function that does.
    """
    runtime.cudaGetLastError.restype = ctypes.c_int
    return int(runtime.cudaGetLastError())


def unregister(address: int) -> None:
    """`cudaHostUnregister`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def pin_segment(
    name: str, memory: torch.Tensor, call: Register = register, undo: Callable[[int], None] = unregister
) -> None:
    """Pin a mapped segment, or nothing of it.

    Raises:
        HostMemoryError: CUDA refused; says size, limit and remedy.
    """
    began = time.monotonic()
    done: list[int] = []
    for address, nbytes in chunks(memory.data_ptr(), memory.nbytes):
        code = call(address, nbytes)
        if code:
            for pinned in done:
                undo(pinned)
            advice = memlock_problem(memory.nbytes) or "another limit of the driver or of this container"
            raise HostMemoryError(
                f"CUDA refused to pin {nbytes / 2**30:.2f} GiB of segment {name} (error {code}): {advice}"
            )
        done.append(address)
    log.info("pinned %s, %.1f MiB in %.0f ms", name, memory.nbytes / 2**20, (time.monotonic() - began) * 1e3)


def unpin_segment(name: str, memory: torch.Tensor, undo: Callable[[int], None] = unregister) -> None:
    """Unpin a segment that is about to be dropped."""
    for address, _ in chunks(memory.data_ptr(), memory.nbytes):
        undo(address)
