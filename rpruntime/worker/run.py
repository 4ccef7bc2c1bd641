"""What a worker process does, from its heavy imports on."""

from __future__ import annotations

import gc
import logging
import os
import time

import torch

from rpruntime.process import Child
from rpruntime.status import StatusPage
from rpruntime.store.arena import Arena, Store
from rpruntime.wire.mailbox import Mailbox
from rpruntime.wire.messages import ShutdownMsg
from rpruntime.wire.succession import ResetDoneMsg, ResetMsg
from rpruntime.worker.affinity import bind, pci_address, worker_cores
from rpruntime.worker.memory import free_caches
from rpruntime.worker.rehearsal import Notebook, RehearsalNotes, rehearse, rehearses
from rpruntime.worker.shell import WorkerShell
from rpruntime.worker.transfers import CpuTransfers, CudaTransfers, Transfers

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
COPY_POLL_S = 0.0002


def make_transfers(device: str, limit_gib: float | None) -> tuple[Transfers, dict[str, object]]:
    """The device's copies and what the launcher is told about it. `limit_gib`: of its memory for this process."""
    if not device.startswith("cuda"):
        return CpuTransfers(time.monotonic), {"device": device, "name": "CPU", "memory_bytes": 0}
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)  # the launcher lets this process see one device
    memory = properties.total_memory
    if limit_gib is not None and limit_gib * 2**30 < memory:
        torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / memory)
        memory = int(limit_gib * 2**30)
    return CudaTransfers(time.monotonic), {"device": device, "name": properties.name, "memory_bytes": memory}


def run(child: Child, page: StatusPage) -> None:
    """Serve until the launcher says stop or dies."""
    child.hello()
    device = child.device
    torch.set_num_threads(int(child.config["threads_per_worker"]))
    try:
        transfers, info = make_transfers(device, child.config.get("device_memory"))
    except Exception as err:
        child.start_failed(f"{device} cannot be used: {err}")
        return
    pin = unpin = None
    if device.startswith("cuda"):
        if child.config["cpu_affinity"] == "numa":
            bind(worker_cores(pci_address(torch.cuda.get_device_properties(0)), os.sched_getaffinity(0)))
        from rpruntime.worker.pinning import pin_segment, unpin_segment

        pin, unpin = pin_segment, unpin_segment
    store = Store(child.segments, pin, unpin)
    arena = Arena(f"{child.role}.{child.incarnation}", child.segments, store)
    peers = tuple(f"worker-{index}" for index in range(len(child.config["devices"])))
    notes = child.folder / f"{child.role}.rehearsal" if rehearses(transfers.device, len(peers)) else None
    found, told = RehearsalNotes(), False
    try:
        if notes is not None and child.incarnation > 1:
            found = rehearse(notes, store, transfers, child.segments.handed_to(child.role))
        while True:
            notebook = Notebook(notes, found)
            shell = WorkerShell(child.mailbox, arena, transfers, peers, device, status=page, notebook=notebook)
            if not told:
                child.ready(info)
                told = True
            reset = serve(shell, child.mailbox)
            if reset is None:
                break
            del shell
            notebook.clear()
            found = RehearsalNotes()
            let_go(arena, transfers, page)
            peers = tuple(role for role in peers if role not in reset.retired)
            child.mailbox.send("launcher", ResetDoneMsg(child.role, reset.incarnation))
    except Exception as err:  # the device is lost, or a defect of ours: this process cannot go on, another can
        log.exception("this worker ends")
        child.fail(f"{type(err).__name__}: {str(err).strip().splitlines()[0] if str(err).strip() else ''}")
    child.end()


def let_go(arena: Arena, transfers: Transfers, page: StatusPage) -> None:
    """Forget all work: what is under way ends first, then the device's memory and the arena are free."""
    if transfers.device.type == "cuda":
        torch.cuda.synchronize()
    gc.collect()  # modules and their gradients hang together in cycles
    free_caches(transfers.device)
    arena.clear()
    page.at(0)
    page.finishing(0)
    page.set_busy(False)


def serve(shell: WorkerShell, mailbox: Mailbox) -> ResetMsg | None:
    """Until the launcher says stop (None) or that another controller will come."""
    busy = False
    while True:
        wait = 0.0 if busy else (COPY_POLL_S if shell.is_waiting_for_copies else IDLE_WAIT_S)
        messages = mailbox.receive(wait)
        if any(isinstance(msg, ShutdownMsg) for msg in messages):
            return None
        reset = next((msg for msg in messages if isinstance(msg, ResetMsg)), None)
        if reset is not None:
            return reset
        busy = shell.step(messages)
