"""What a replacement does before it says that it is ready, so that afterwards nobody waits for it.

The first run of a stage in a process takes seconds: libraries are loaded, kernels are chosen or compiled, memory is
page-locked. A worker notes each kind of stage that it runs for the first time; its replacement runs one micro-batch of
each on zeros, in memory of its own, while the others do the work, and maps what its predecessors had mapped.

    FOLDER/ROLE.rehearsal    the notes, 0600
    FOLDER/ROLE.rehearsing   the same during a rehearsal. Who finds it knows that one has ended its process, or hung,
                             and neither rehearses nor notes anything for another one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rpruntime.private_files import write_private
from rpruntime.store.arena import Arena, Store
from rpruntime.store.handle import Payload, TensorHandle
from rpruntime.store.segments import PrivateSegments
from rpruntime.wire.codec import decode, encode, pack_struct, struct, unpack_struct
from rpruntime.wire.messages import CallMsg, Key, ModelSpec, SlotTask
from rpruntime.worker.events import RunMicrobatch
from rpruntime.worker.memory import free_caches
from rpruntime.worker.modules import WorkerModel, read_bytes
from rpruntime.worker.stage import Stage
from rpruntime.worker.transfers import Pieces, Transfers, variant

log = logging.getLogger(__name__)

REHEARSAL_VARIABLE = "RPRUNTIME_REHEARSAL"
"""Which replacements rehearse: those on a "gpu" that is not the only one (the default), "all", or "none"."""

MAX_NOTES = 64
"""Kinds of stages that are noted: a model of layers that all differ is not run as a whole."""


@struct
@dataclass(frozen=True, slots=True)
class StageNote:
    """A micro-batch of a stage, as it was run: of tensors only what they look like."""

    kind: tuple[Any, ...]
    """What stages have in common that run the same kernels, as far as that can be told from outside."""
    task: SlotTask
    call: tuple[bytes, ...]
    """Frames of the `CallMsg`."""
    inputs: tuple[tuple[Key, Payload], ...]


@struct
@dataclass(frozen=True, slots=True)
class RehearsalNotes:
    """All that a process noted; `models` are (number, where its `ModelSpec` lies)."""

    models: tuple[tuple[int, TensorHandle], ...] = ()
    stages: tuple[StageNote, ...] = ()


def rehearses(device: torch.device, num_devices: int) -> bool:
    """Whether replacements on this device rehearse: where it is the only one, nobody works meanwhile."""
    choice = variant(REHEARSAL_VARIABLE, "gpu", "all", "none")
    return choice == "all" or (choice == "gpu" and device.type != "cpu" and num_devices > 1)


class Notebook:
    """A worker's notes for its replacement.

    Args:
        path: their file; None: nothing is noted.
        found: what its predecessors had noted.
    """

    def __init__(self, path: Path | None, found: RehearsalNotes | None = None) -> None:
        self._path = path
        self._is_open = path is not None and not _taken(path).exists()
        found = found or RehearsalNotes()
        self._handles = dict(found.models)
        self._notes = {note.kind: note for note in found.stages}
        self._specs: dict[int, ModelSpec] = {}
        self._seen: set[tuple[int, str, tuple[int, int]]] = set()
        """(model, kind of slot, layers) of stages that need no look."""

    def add_model(self, spec: ModelSpec, handle: TensorHandle) -> None:
        """A model has been built, from what lies under this handle."""
        self._specs[spec.model], self._handles[spec.model] = spec, handle

    def forget_model(self, number: int) -> None:
        """Nothing of it runs any more."""
        self._specs.pop(number, None)
        self._seen = {place for place in self._seen if place[0] != number}
        known = self._handles.pop(number, None) is not None
        self._notes = {kind: note for kind, note in self._notes.items() if note.task.model != number}
        if known and self._is_open:
            self._write()

    def clear(self) -> None:
        """Nothing of any model runs any more, whoever noted it."""
        for path in () if self._path is None else (self._path, _taken(self._path)):
            with contextlib.suppress(OSError):
                path.unlink()

    def add(self, work: RunMicrobatch) -> None:
        """A micro-batch has been launched; costs a look into a set where its stage is known."""
        task = work.task
        place = task.model, task.kind, task.layers
        if not self._is_open or place in self._seen:
            return
        self._seen.add(place)
        kind = self._kind(work)
        too_large = any(isinstance(payload.skeleton, TensorHandle) for payload in work.inputs.values())
        if kind not in self._notes and not too_large and len(self._notes) < MAX_NOTES:
            task = replace(task, microbatches=(work.microbatch,), attempt=0)
            self._notes[kind] = StageNote(kind, task, tuple(encode(work.call)), tuple(work.inputs.items()))
            self._write()

    def _kind(self, work: RunMicrobatch) -> tuple[Any, ...]:
        task, spec = work.task, self._specs[work.task.model]
        classes = tuple(
            (spec.layers[p].class_name, *(spec.units[unit].nbytes for unit in spec.layers[p].units))
            for p in range(*task.layers)
        )
        shapes = sorted(
            (key[0], *((handle.shape, handle.stride, handle.dtype) for handle in payload.tensors))
            for key, payload in work.inputs.items()
        )
        return task.model, task.kind, task.layers[1] == len(spec.layers), classes, tuple(shapes)

    def _write(self) -> None:
        assert self._path is not None
        models = {note.task.model for note in self._notes.values()}
        handles = tuple((number, handle) for number, handle in self._handles.items() if number in models)
        try:
            write_private(self._path, pack_struct(RehearsalNotes(handles, tuple(self._notes.values()))))
        except Exception as err:  # the disk is full, say: a replacement will start slowly
            log.warning("what a replacement would rehearse cannot be written down: %s: %s", type(err).__name__, err)


def _taken(path: Path) -> Path:
    """The notes' name during a rehearsal."""
    return path.with_suffix(".rehearsing")


def rehearse(path: Path, store: Store, transfers: Transfers, mapped: Iterable[str]) -> RehearsalNotes:
    """Run what a predecessor noted, and map segments; what goes wrong in that is only logged.

    Args:
        path: the predecessor's notes.
        store: this process's.
        transfers: copies to and from its device.
        mapped: names of segments.

    Returns:
        The notes, of stages that ran.

    Raises:
        Exception: the device cannot be used any more.
    """
    began = time.monotonic()
    taken = _take(path)
    found = taken or RehearsalNotes()
    models = _build(found, store, transfers.device)
    # page-locking takes as long as the first runs; until it is done, the store is that thread's alone
    mapping = threading.Thread(target=_map, args=(store, mapped), name="mapping", daemon=True)
    mapping.start()
    try:
        # backward first: what is compiled for it takes longest, and the processor does that beside the page-locking
        stages = sorted(found.stages, key=lambda note: note.task.kind != "backward")
        ran = [note for note in stages if note.task.model in models and _run(note, models[note.task.model], transfers)]
    finally:
        mapping.join()
    models.clear()
    gc.collect()  # modules and their gradients hang together in cycles
    free_caches(transfers.device)
    if taken is not None:
        with contextlib.suppress(OSError):
            _taken(path).rename(path)
    log.info("rehearsed %d kinds of stages in %.2f s", len(ran), time.monotonic() - began)
    return replace(found, stages=tuple(note for note in found.stages if note in ran))


def _take(path: Path) -> RehearsalNotes | None:
    """Read the notes and take their file away; None: nothing was noted, or a rehearsal ended the last process."""
    try:
        found = unpack_struct(path.rename(_taken(path)).read_bytes())
        assert isinstance(found, RehearsalNotes)
        return found
    except FileNotFoundError:
        return None
    except Exception as err:
        log.warning("the notes for a rehearsal cannot be read: %s: %s", type(err).__name__, err)
        with contextlib.suppress(OSError):
            _taken(path).unlink()
        return None


def _build(found: RehearsalNotes, store: Store, device: torch.device) -> dict[int, WorkerModel]:
    """The models by number, without those that cannot be built."""
    models: dict[int, WorkerModel] = {}
    for number, spec in found.models:
        try:
            models[number] = WorkerModel(unpack_struct(read_bytes(store, spec)), store, device)
        except Exception as err:
            log.info("model %d cannot be rehearsed: %s: %s", number, type(err).__name__, err)
    return models


def _map(store: Store, segments: Iterable[str]) -> None:
    for name in segments:
        try:
            store.segment(name)
        except Exception as err:  # it has gone, or cannot be page-locked: who needs it will say so
            log.info("segment %s is not mapped beforehand: %s", name, err)


class _Still:
    """A copy that moves nothing and is done."""

    def __init__(self, result: torch.Tensor) -> None:
        self.nbytes = result.nbytes
        self._result = result

    def start(self, first: int, stop: int) -> None:
        pass

    def wait(self) -> torch.Tensor:
        return self._result

    def done(self) -> bool:
        return True


class _WithoutCopies:
    """A device's transfers that touch no host memory: what would come up is zeros, nothing goes down."""

    def __init__(self, real: Transfers) -> None:
        self.device, self.log = real.device, real.log
        self.mark, self.reached, self.when_ms = real.mark, real.reached, real.when_ms
        self.peak_bytes, self.check = real.peak_bytes, real.check

    def upload(self, host: torch.Tensor) -> _Still:
        return _Still(torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device).zero_())

    def download(self, source: torch.Tensor, host: torch.Tensor) -> _Still:
        return _Still(host)

    def upload_pieces(self, host: torch.Tensor) -> Pieces:
        return self.upload(host)

    def download_pieces(self, source: torch.Tensor, host: torch.Tensor) -> Pieces:
        return self.download(source, host)


def _run(note: StageNote, model: WorkerModel, real: Transfers) -> bool:
    """One micro-batch on zeros; False: it raised."""
    segments, transfers = PrivateSegments(), _WithoutCopies(real)
    with contextlib.closing(segments):
        arena = Arena("rehearsal.0", segments, Store(segments))  # never written, so it takes no memory
        stage = Stage(note.task, model, transfers, arena)
        try:
            for unit in sorted({unit for p in range(*note.task.layers) for unit in model.msg.layers[p].units}):
                weights = arena.store.bytes_of(arena.allocate(model.msg.units[unit].nbytes))
                stage.weights[unit] = transfers.upload_pieces(weights)
            call = decode(list(note.call))
            assert isinstance(call, CallMsg)
            inputs = {key: _same_shape(payload, arena) for key, payload in note.inputs}
            stage.run(RunMicrobatch(note.task, call, note.task.microbatches[0], inputs))
            stage.finish()
            return True
        except (Exception, SystemExit) as err:
            log.info("rehearsing %s of layers %s: %s: %s", note.task.kind, note.task.layers, type(err).__name__, err)
            stage.drop()
            return False
        finally:
            transfers.check()


def _same_shape(payload: Payload, arena: Arena) -> Payload:
    """A payload of tensors that look the same."""
    extents = {extent: arena.allocate(extent.nbytes) for extent in payload.extents()}
    return replace(payload, tensors=tuple(replace(handle, extent=extents[handle.extent]) for handle in payload.tensors))
