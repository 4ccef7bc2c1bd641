"""When a device is out of memory: telling it, making room, saying what would help."""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rpruntime.store.limits import gib

_TEXTS = re.compile(
    r"CUDA out of memory"
    r"|CUDA error: out of memory"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
    r"|CUFFT_ALLOC_FAILED"
    # what a library says whose handle finds no room, since torch's cache has it all
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
    r"|CUDNN_STATUS_NOT_INITIALIZED"
)
_ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)\b")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an exception, or what it was raised `from`, says that the device has no memory left."""
    found: BaseException | None = err
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, torch.OutOfMemoryError):
            return True
        if isinstance(found, RuntimeError) and _TEXTS.search(_text(found)):
            return True
        found = found.__cause__
    return False


def forget_frames(err: BaseException) -> None:
    """Let go of the local variables that the exception's traceback keeps alive; lines and text stay."""
    for found in _chain(err):
        traceback.clear_frames(found.__traceback__)


def free_caches(device: torch.device) -> None:
    """Give back what nobody uses: Python's cycles, then the blocks that torch's allocator holds for later.

    The highest use begins anew, so that a failed attempt is not taken for what the slot needs.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def asked_bytes(err: BaseException) -> int | None:
    """How much an out-of-memory error asked for, in bytes; None: it does not say."""
    for found in _chain(err):
        match = _ASKED.search(_text(found))
        if match:
            return int(float(match[1]) * _UNITS[match[2]])
    return None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device. `reserved` is what torch holds of it in this process, `in_use` the tensors in that."""

    in_use: int
    reserved: int
    free: int
    total: int


def read_memory(device: torch.device) -> DeviceMemory | None:
    """The device's figures; None where there are none (CPU)."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)


def explain(
    err: BaseException,
    *,
    phase: str,
    layer: str,
    stage: range,
    device: str,
    memory: DeviceMemory | None,
    by_layer: bool = False,
    recompute: str = "stage",
    num_microbatches: int = 0,
) -> torch.OutOfMemoryError:
    """An error in the user's words, with the frames of `err`.

    Args:
        err: what was raised.
        phase: what was going on, "backward"; "": the weights were on their way.
        layer: the layer that asked, "layer 3 3 (Linear)"; "": some layer of the stage.
        stage: the layers that ran together.
        device: "cuda:0".
        memory: the device's figures when `err` was raised.
        by_layer: the stage ran layer by layer already.
        recompute: the pipe's setting.
        num_microbatches: the call's; 0: not known.
    """
    where = " of ".join(part for part in (phase, layer) if part) or "the upload of the weights"
    layers = f"layer {stage.start}" if len(stage) == 1 else f"layers {stage.start} to {stage.stop - 1}"
    sentences = [f"{device} is out of memory in {where} (stage of {layers}): {_figures(asked_bytes(err), memory)}"]
    if by_layer:
        sentences.append("Freed caches and running the stage layer by layer did not make enough room")
    sentences.append(f"What helps: {', '.join(_advice(stage, memory, recompute, num_microbatches))}")
    said = _text(err).strip().splitlines()
    sentences.append(f"It began with {type(err).__name__}: {said[0][:300] if said else ''}")
    found = torch.OutOfMemoryError(". ".join(sentences))
    return found.with_traceback(err.__traceback__)


def _figures(asked: int | None, memory: DeviceMemory | None) -> str:
    text = "an unknown number of bytes" if asked is None else f"{gib(asked)} ({asked} bytes)"
    text += " asked for"
    if memory is None:
        return text
    return (
        f"{text}, {gib(memory.in_use)} in use by tensors, {gib(memory.reserved - memory.in_use)} more reserved by "
        f"torch, {gib(memory.free)} free of {gib(memory.total)}"
    )


def _advice(stage: range, memory: DeviceMemory | None, recompute: str, num_microbatches: int) -> Iterator[str]:
    now = f" above {num_microbatches}" if num_microbatches else ""
    yield f"more and so smaller micro-batches (num_microbatches{now})"
    if len(stage) > 1:
        if recompute != "layer":
            yield 'recompute="layer"'
        yield "stages of fewer layers (plan)"
    else:
        yield "layers cut into smaller ones in the model"
    yield "shorter sequences or smaller inputs"
    if not any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS):
        yield "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, where much is reserved and not in use"


def _chain(err: BaseException) -> Iterator[BaseException]:
    """The exception and all that it was raised from or during."""
    waiting: list[BaseException | None] = [err]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__]


def _text(err: BaseException) -> str:
    try:
        return str(err)
    except Exception:
        return ""
