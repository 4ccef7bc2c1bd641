"""The screen of `rpctl top`: what `Watch.look` has found, as tables of rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rpruntime.trace.spans import COPIES

_STALE_S = 30.0


def screen(found: dict[str, Any]) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_title(found), Text(""), _devices(found), Text(""), _copies(found)]
    for model in found["models"]:
        parts += [Text(""), *_model(model)]
    if found["memory"]:
        kinds = "   ".join(f"{kind} {_bytes(nbytes)}" for kind, nbytes in found["memory"].items() if nbytes)
        parts += [Text(""), Text.assemble(("host memory  ", "bold"), kinds or "nothing in use")]
    return Group(*parts)


def _title(found: dict[str, Any]) -> Text:
    words = " ".join(found["argv"])
    text = Text.assemble(
        (f"rpruntime  {found['session']}", "bold"), f"   {words}   script {found['script_pid'] or '-'}"
    )
    if found["page_age_s"] is None:
        text.append("   no controller yet", "yellow")
    elif found["page_age_s"] > _STALE_S:
        text.append(f"   nothing new for {found['page_age_s']:.0f} s", "yellow")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _devices(found: dict[str, Any]) -> Table:
    table = _table("device", "stage", "now", right=("computes", "waits", "memory"))
    for row in found["devices"]:
        table.add_row(
            row["device"] + (f" (process {row['incarnation']})" if row["incarnation"] > 1 else ""),
            _stage(row),
            _now(row),
            _percent(row["utilisation"]) + ("" if row["gpu"] is None else f" ({row['gpu']['utilisation']:.0%})"),
            "-" if row["waiting_ms"] is None else _ms(row["waiting_ms"]),
            _memory(row),
        )
    return table


def _copies(found: dict[str, Any]) -> Table:
    table = _table("copies", right=COPIES)
    for row in found["devices"]:
        rates = row["copies_bytes_per_s"]
        table.add_row(row["device"], *("-" if rates is None else _rate(rates[stream]) for stream in COPIES))
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _stage(row: dict[str, Any]) -> str:
    stage = row["stage"]
    if stage is None:
        return "" if row["state"] == "ready" else row["state"]
    first, last = stage["layers"][0], stage["layers"][1] - 1
    step = "" if stage["step"] < 0 else f" of step {stage['step']}"
    return f"{stage['kind']} {first}" + (f"-{last}" if last > first else "") + step


def _now(row: dict[str, Any]) -> str:
    if not row["slot"]:
        return "idle" if row["state"] == "ready" else ""
    words = [row["phase"]] if row["phase"] else ["on the device"]
    if row["layer"] >= 0:
        words.append(f"layer {row['layer']}")
    if row["microbatch"] >= 0:
        words.append(f"mb {row['microbatch'] + 1}")
    return " ".join(words)


def _memory(row: dict[str, Any]) -> str:
    if row["gpu"] is not None:
        return f"{_bytes(row['gpu']['used_bytes'])} of {_bytes(row['memory_bytes'])}"
    if not row["memory_bytes"]:
        return "-"
    return f"{_bytes(row['peak_bytes'])} of {_bytes(row['memory_bytes'])}"


def _model(model: dict[str, Any]) -> list[RenderableType]:
    values = model["values"]
    mode = "asynchronous" if model["asynchronous"] else "synchronous"
    head = Text.assemble((f"{model['name']}  ", "bold"), f"{model['layers']} layers, {mode}")
    if model["plan"]:
        head.append(f", {model['plan']}")
    lines: list[RenderableType] = [head]
    if values:
        words = [f"step {values['step']}", f"loss {values['loss']:.4g}"]
        if "grad_norm" in values:
            words.append(f"grad norm {values['grad_norm']:.3g}")
        if "lr" in values:
            words.append(f"lr {values['lr']:.3g}")
        for name, what in (("tokens_per_s", "tok/s"), ("items_per_s", "items/s")):
            if name in values:
                words.append(f"{_count(values[name])} {what}")
        words.append(f"{_ms(values['step_s'] * 1e3)} a step")
        lines.append(Text("  " + "   ".join(words)))
    optimizer = model["optimizer"]
    if optimizer["step"] >= 0:
        done = optimizer["units"] / max(1, optimizer["of"])
        bar = "=" * round(20 * done)
        units = f"{optimizer['units']} of {optimizer['of']} units"
        took = _ms(values["optimizer_s"] * 1e3) if values else "-"
        lines.append(Text(f"  optimizer  step {optimizer['step']} [{bar:20}] {units}, {took} a step"))
    bubbles = model["bubbles"]
    if bubbles is not None:
        shares = "   ".join(f"{name} {bubbles[name]:.1%}" for name in ("fill", "switch", "intra", "drain"))
        lines.append(Text(f"  bubbles of step {bubbles['iteration']}  {bubbles['bubble']:.1%}: {shares}"))
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ms(value: float) -> str:
    return f"{value / 1e3:.1f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def _bytes(value: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value >= 1e7 else f"{value / 1e6:.2f} MB/s"


def _count(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 10_000 else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
