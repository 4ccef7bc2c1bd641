"""Tokens per second of one system on the decoder of scripts/decoder.py; one JSON line on stdout.

    rplaunch --devices cuda scripts/bench.py ours --shape 1.7b --batch 64 --microbatches 8
    python scripts/bench.py ceiling --shape 1.7b --batch 64 --microbatches 8      GPU-resident, one GPU, no optimizer
    python scripts/bench.py table --shape 1.7b --batch 64 --microbatches 8        all in turn, with ratios

Systems: ceiling, ceiling-whole (see `ceiling`), ours, ours-sync, peer, peer-sync (the package `roundpipe`, where it is
installed).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import decoder
import torch

ROOT = Path(__file__).resolve().parent.parent


def ceiling(options: argparse.Namespace, whole: bool) -> dict[str, Any]:
    """A GPU-resident bf16 model with full recomputation: what one GPU can do without transfers and optimizer.

    torch's checkpoints keep the graph of the forward, so they recompute a block as far as its backward reads it: not
    the last product. `whole`: the blocks are recomputed to their ends, as where the graph does not outlive the forward.
    """
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    model, vocabulary = decoder.build(options.shape, device="cuda")
    ids = decoder.batch(vocabulary, options.batch, options.seq).cuda()

    def step() -> torch.Tensor:
        for chunk in ids.chunk(options.microbatches):
            x = model[0](chunk)
            for block in model[1:-1]:
                with set_checkpoint_early_stop(not whole):
                    x = checkpoint(block, x, use_reentrant=False)
            loss = decoder.loss_fn(model[-1](x), chunk) / options.microbatches
            loss.backward()
        return loss.detach()

    seconds, loss = timed(step, torch.cuda.synchronize, options)
    return {"gpus": 1, "seconds": seconds, "loss": float(loss), "gpu_gb": torch.cuda.max_memory_allocated() / 1e9}


def ours(options: argparse.Namespace, asynchronous: bool) -> dict[str, Any]:
    """This project, on the session that rplaunch made.

    `seconds` has the last step in, which overlaps with no computation; `steady_s` is the median time from one
    iteration's loss to the next one's; `first_loss_s` is from the wrapped model to its first loss.
    """
    import rpruntime as rp

    head = decoder.OpenHead if options.chunked_head else decoder.Head
    model, vocabulary = decoder.build(options.shape, head=head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = decoder.batch(vocabulary, options.batch, options.seq)
    began = time.perf_counter()
    pipe = rp.RoundPipe(
        model,
        optimizer,
        loss_fn=decoder.chunked_loss_fn if options.chunked_head else decoder.loss_fn,
        num_microbatches=options.microbatches,
        asynchronous=asynchronous,
        recompute=options.recompute,
        plan=plan_of(options.plan, len(model)),
    )
    infos = []
    ends = []

    def step() -> Any:
        loss = pipe.forward_backward(ids, ids)
        ends.append(time.perf_counter())
        infos.append(pipe.step())
        return loss

    seconds, loss = timed(step, pipe.synchronize, options)
    tuner = pipe._tuner
    optimizer_s = sum(info.seconds for info in infos[-options.iters :]) / options.iters
    return {
        "gpus": len(pipe._model.client.session.devices),
        "seconds": seconds,
        "loss": float(loss),
        "steady_s": median(after - before for before, after in pairwise(ends[-options.iters :])),
        "first_loss_s": round(ends[0] - began, 1),
        "optimizer_s": round(optimizer_s, 3),
        "gpu_gb": tuner.peak_bytes / 1e9,
        **host_figures(pipe._model.client.session, model, boundary_bytes(options, pipe.plan)),
        "plan": f"{len(pipe.plan.forward)}+{len(pipe.plan.backward)}",
    }


def plan_of(text: str, num_layers: int) -> Any:
    """ "auto", "layers", or "F,B": forward stages of F layers and backward stages of B layers, the head fused alone."""
    import rpruntime as rp

    if not text[0].isdigit():
        return text
    forward, backward = (int(part) for part in text.split(","))
    body = num_layers - 1
    ends = list(range(body, 0, -backward))
    return rp.ExecutionPlan(
        [range(a, min(a + forward, body)) for a in range(0, body, forward)],
        [range(body, num_layers), *(range(max(0, end - backward), end) for end in ends)],
    )


def peer(options: argparse.Namespace, asynchronous: bool) -> dict[str, Any]:
    """The package `roundpipe` through its public interface."""
    import roundpipe
    from roundpipe.optim import Adam

    built, vocabulary = decoder.build(options.shape)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches)
    model = roundpipe.RoundPipe(built, optim_dtype=torch.float32, model_run_config=config)
    optimizer = Adam(model.optim_parameters(), lr=1e-5)
    ids = decoder.batch(vocabulary, options.batch, options.seq)

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return decoder.loss_fn(logits, labels) / options.microbatches

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> Any:
        loss = model.forward_backward(input_args=(ids,), label=ids, loss_fn=loss_fn)
        model.step(update, is_async=asynchronous)
        return loss

    def finish() -> None:
        model.optim_updated.wait()
        torch.cuda.synchronize()

    seconds, loss = timed(step, finish, options)
    gpus = torch.cuda.device_count()
    used = max(torch.cuda.max_memory_allocated(index) for index in range(gpus)) / 1e9
    return {"gpus": gpus, "seconds": seconds, "loss": float(loss), "gpu_gb": used}


def timed(step: Any, finish: Any, options: argparse.Namespace) -> tuple[float, Any]:
    """Seconds an iteration after warming up, and the last loss."""
    for _ in range(options.warmup):
        loss = step()
    finish()
    began = time.perf_counter()
    for _ in range(options.iters):
        loss = step()
    finish()
    return (time.perf_counter() - began) / options.iters, loss


def boundary_bytes(options: argparse.Namespace, plan: Any) -> int:
    """Activations in host memory at their most: of every boundary between stages, with `--recompute layer` of every
    layer of the backward stages, and the gradients of one boundary."""
    boundaries = {stage.start for stage in (*plan.forward, *plan.backward)} - {0}
    if options.recompute == "layer":
        boundaries |= {position for stage in plan.backward[1:] for position in stage} - {0}
    width = decoder.SHAPES[options.shape][0]
    return (len(boundaries) + 1) * options.batch * options.seq * width * torch.bfloat16.itemsize


def host_figures(session: Any, model: Any, boundaries: int) -> dict[str, Any]:
    """Shared memory and what all processes have beside it; without activations between stages, bytes a parameter."""
    held = session.segments.held_bytes()
    each = private_bytes()
    private = sum(each.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    used = sum(held.values()) + private
    return {
        "host_gb": used / 1e9,
        "private_gb": private / 1e9,
        "private_by_process_gb": {name: round(nbytes / 1e9, 2) for name, nbytes in each.items()},
        "shared_gb": {owner: round(nbytes / 1e9, 2) for owner, nbytes in held.items()},
        "bytes_a_parameter": round((used - boundaries) / parameters, 2),
    }


def private_bytes() -> dict[str, int]:
    """Resident memory of this session's processes beside shared memory, by the process's name; of a page that several
    have, each has its part."""
    folder = os.environ.get("RPRUNTIME_SESSION", "")
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            parent = f"RPRUNTIME_SESSION={folder}" in variables or f"RPRUNTIME_FOLDER={folder}" in variables
            if folder and (parent or entry.name == str(os.getppid())):
                rows = (entry / "smaps_rollup").read_text().splitlines()
                name = (entry / "comm").read_text().strip()
                nbytes = sum(int(row.split()[1]) << 10 for row in rows if row.startswith(("Pss_Anon:", "Pss_File:")))
                found[name] = found.get(name, 0) + nbytes
        except (OSError, NotADirectoryError):
            continue
    return found


def table(options: argparse.Namespace) -> int:
    """Each system in a process of its own, one after another; ratios to the ceiling times the number of GPUs."""
    words = ["--shape", options.shape, "--seq", options.seq, "--batch", options.batch, "--warmup", options.warmup]
    words += ["--microbatches", options.microbatches, "--iters", options.iters, "--plan", options.plan]
    words += ["--recompute", options.recompute, *(["--chunked-head"] if options.chunked_head else [])]
    print(f"{options.shape}, sequence {options.seq}, batch {options.batch}, M {options.microbatches}")
    print(f"{'system':13} {'GPUs':>4} {'tokens/s':>9} {'s/iter':>8} {'ratio':>6} {'GPU GB':>7} {'host GB':>8}  notes")
    best = None
    num_rows = 0
    for system in options.systems.split(","):
        row = run_row(system, words, ["--devices", options.devices], timeout_s=options.timeout)
        if row is None:
            continue
        num_rows += 1
        if system == "ceiling":
            best = row["tokens_s"]
        show(row, best)
    return 0 if num_rows else 1


def run_row(
    system: str, words: list[Any], flags: list[str], *, timeout_s: float, variables: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """One system in a process of its own: its JSON line; None: it failed, and the end of what it said is shown.

    Args:
        system: as on the command line.
        words: further arguments.
        flags: of rplaunch, for our systems.
        timeout_s: then it is killed.
        variables: added to the environment.
    """
    front = [sys.executable]
    if system.startswith("ours"):
        front += ["-m", "launcher", "-q", *flags]
    command = [*front, str(Path(__file__).resolve()), system, *map(str, words)]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        print(f"{system}: not done after {timeout_s:.0f} s", file=sys.stderr, flush=True)
        return None
    line = next((text for text in reversed(run.stdout.splitlines()) if text.startswith("{")), "")
    if run.returncode or not line:
        print(f"{system}: exit {run.returncode}\n{run.stderr[-1500:]}", file=sys.stderr, flush=True)
        return None
    return dict(json.loads(line))


def show(row: dict[str, Any], best: float | None) -> None:
    """One line of the table; `best`: tokens a second of the ceiling on one GPU."""
    ratio = "" if best is None else f"{row['tokens_s'] / best / row['gpus']:.3f}"
    names = ("plan", "steady_s", "first_loss_s", "optimizer_s", "private_gb", "bytes_a_parameter")
    notes = ", ".join(f"{name} {row[name]}" for name in names if name in row)
    print(
        f"{row['system']:13} {row['gpus']:4} {row['tokens_s']:9,.0f} {row['seconds']:8.3f} {ratio:>6} "
        f"{row.get('gpu_gb', 0):7.1f} {row.get('host_gb', 0):8.1f}  {notes}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "system", choices=["ceiling", "ceiling-whole", "ours", "ours-sync", "peer", "peer-sync", "table"]
    )
    parser.add_argument("--shape", default="1.7b", choices=list(decoder.SHAPES))
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence (2048)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of an iteration (64)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (8)")
    parser.add_argument("--warmup", type=int, default=4, help="iterations before the clock starts (4)")
    parser.add_argument("--iters", type=int, default=6, help="timed iterations (6)")
    parser.add_argument("--plan", default="auto", help='"auto", "layers" or "F,B" layers a forward and backward stage')
    parser.add_argument("--recompute", default="stage", choices=["stage", "layer"])
    parser.add_argument("--chunked-head", action="store_true", help="ours: a loss that never holds all logits")
    parser.add_argument("--systems", default="ceiling,peer,ours", help="of a table, comma-separated")
    parser.add_argument("--devices", default="cuda", help="for our rows of a table (cuda)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each row of a table (300)")
    options = parser.parse_args()
    if options.system == "table":
        return table(options)
    run = {
        "ceiling": lambda o: ceiling(o, False),
        "ceiling-whole": lambda o: ceiling(o, True),
        "ours": lambda o: ours(o, True),
        "ours-sync": lambda o: ours(o, False),
        "peer": lambda o: peer(o, True),
        "peer-sync": lambda o: peer(o, False),
    }[options.system]
    result = run(options)
    tokens = options.batch * options.seq
    row = {"system": options.system, "shape": options.shape, "tokens_s": tokens / result["seconds"], **result}
    print(
        json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}),
        flush=True,
    )
    sys.stdout.flush()
    if options.system.startswith("peer"):
        os._exit(0)  # its threads do not end by themselves
    return 0


if __name__ == "__main__":
    sys.exit(main())
