"""The screen of `rpctl top`: what `Watch.look` has found, as tables of rich.

Nothing is ever wrapped. Where the terminal is narrow, a table or line takes a shorter form, and less important columns
go first; what has no room in its shortest form either is cut at the right edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rpruntime.trace.spans import COPIES

_STALE_S = 30.0


_UNBOUNDED = 10_000
"""Columns, to measure what something would take."""


class _Fitting:
    """The first of several forms of the same for which there is room, from the fullest to the shortest; else the last.

    Args:
        forms: tables, and texts as `_line` makes them.
    """

    def __init__(self, *forms: Table | Text) -> None:
        self._forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for form in self._forms:
            wanted = Measurement.get(console, options.update(max_width=_UNBOUNDED), form).maximum
            if wanted <= options.max_width:
                break
        if isinstance(form, Table):
            form.width = wanted  # else rich takes something from every cell, until none can be read
        yield form


def screen(found: dict[str, Any]) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_title(found), Text(""), _devices(found), Text(""), _copies(found)]
    for model in found["models"]:
        parts += [Text(""), *_model(model)]
    if found["memory"]:
        parts += [Text(""), _host_memory(found["memory"])]
    return Group(*parts)


def _line(*parts: str | tuple[str, str]) -> Text:
    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _title(found: dict[str, Any]) -> Text:
    news = ""
    if found["page_age_s"] is None:
        news = "   no controller yet"
    elif found["page_age_s"] > _STALE_S:
        news = f"   nothing new for {found['page_age_s']:.0f} s"
    words = " ".join(found["argv"])
    # The news first: it must not be cut off behind a long command.
    head = (f"rpruntime  {found['session']}", "bold"), (news, "yellow")
    return _line(*head, f"   {words}   script {found['script_pid'] or '-'}")


def _host_memory(nbytes_by_kind: dict[str, int]) -> _Fitting:
    kinds = [f"{kind} {_bytes(nbytes)}" for kind, nbytes in nbytes_by_kind.items() if nbytes] or ["nothing in use"]
    name = "host memory  "
    half = (len(kinds) + 1) // 2
    two_lines = "   ".join(kinds[:half]) + "\n" + " " * len(name) + "   ".join(kinds[half:])
    return _Fitting(_line((name, "bold"), "   ".join(kinds)), _line((name, "bold"), two_lines.rstrip()))


Row = dict[str, Any]
"""Of a device."""


def _devices(found: dict[str, Any]) -> _Fitting:
    return _Fitting(*(_table(found["devices"], columns) for columns in _DEVICE_TABLES))


def _copies(found: dict[str, Any]) -> _Fitting:
    full: dict[str, Callable[[Row], str]] = {"copies": lambda row: str(row["device"])}
    short = dict(full)
    for stream in COPIES:
        full[stream] = short[stream.replace("activations", "act.").replace("gradients", "grad.")] = _copied(stream)
    return _Fitting(_table(found["devices"], full), _table(found["devices"], short))


def _copied(stream: str) -> Callable[[Row], str]:
    def rate(row: Row) -> str:
        rates = row["copies_bytes_per_s"]
        return "-" if rates is None else _rate(rates[stream])

    return rate


def _table(rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, cell in columns.items():
        table.add_column(
            name, justify="left" if name in _LEFT else "right", no_wrap=True, min_width=_MIN_WIDTHS.get(cell)
        )
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _device(row: Row) -> str:
    return row["device"] + (f" (process {row['incarnation']})" if row["incarnation"] > 1 else "")


def _short_device(row: Row) -> str:
    return row["device"] + (f" ({row['incarnation']})" if row["incarnation"] > 1 else "")


def _stage(row: Row) -> str:
    stage = row["stage"]
    return _layers(row) + ("" if stage is None or stage["step"] < 0 else f" of step {stage['step']}")


def _layers(row: Row) -> str:
    stage = row["stage"]
    if stage is None:
        return "" if row["state"] == "ready" else str(row["state"])
    first, last = stage["layers"][0], stage["layers"][1] - 1
    return f"{stage['kind']} {first}" + (f"-{last}" if last > first else "")


def _now(row: Row) -> str:
    return _place(row, "layer ")


def _short_now(row: Row) -> str:
    return _place(row, "")


def _place(row: Row, layer: str) -> str:
    if not row["slot"]:
        return "idle" if row["state"] == "ready" else ""
    words = [row["phase"]] if row["phase"] else ["on the device"]
    if row["layer"] >= 0:
        words.append(f"{layer}{row['layer']}")
    if row["microbatch"] >= 0:
        words.append(f"mb {row['microbatch'] + 1}")
    return " ".join(words)


def _computes(row: Row) -> str:
    return _busy(row) + ("" if row["gpu"] is None else f" ({row['gpu']['utilisation']:.0%})")


def _busy(row: Row) -> str:
    return "-" if row["utilisation"] is None else f"{row['utilisation']:.0%}"


def _waits(row: Row) -> str:
    return "-" if row["waiting_ms"] is None else _ms(row["waiting_ms"])


def _memory(row: Row) -> str:
    if not row["memory_bytes"]:
        return "-"
    return f"{_bytes(_used_bytes(row))} of {_bytes(row['memory_bytes'])}"


def _short_memory(row: Row) -> str:
    if not row["memory_bytes"]:
        return "-"
    size, unit = _unit(row["memory_bytes"])
    return f"{_used_bytes(row) / size:.1f}/{row['memory_bytes'] / size:.1f} {unit}"


def _used_bytes(row: Row) -> int:
    return int(row["peak_bytes"] if row["gpu"] is None else row["gpu"]["used_bytes"])


_LEFT = ("device", "stage", "now", "copies")
_ROOMY: dict[str, Callable[[Row], str]] = {
    "device": _device, "stage": _stage, "now": _now, "computes": _computes, "waits": _waits, "memory": _memory,
}  # fmt: skip
_CLOSE = {**_ROOMY, "stage": _layers, "memory": _short_memory}
_TIGHT = {**_CLOSE, "device": _short_device, "now": _short_now, "computes": _busy}
_NO_WAITS = {name: cell for name, cell in _TIGHT.items() if name != "waits"}  # they are what `computes` leaves
_NO_MEMORY = {name: cell for name, cell in _NO_WAITS.items() if name != "memory"}
_DEVICE_TABLES = (_ROOMY, _CLOSE, _TIGHT, _NO_WAITS, _NO_MEMORY)
_MIN_WIDTHS: dict[Callable[[Row], str], int] = {
    _stage: len("backward 3-5 of step 19"), _layers: len("backward 3-5"),
    _now: len("recompute layer 4 mb 3"), _short_now: len("recompute 4 mb 3"),
}  # fmt: skip
"""Of cells that change from one look to the next: the form of the table should not change with them."""


def _model(model: dict[str, Any]) -> list[RenderableType]:
    values = model["values"]
    mode = "asynchronous" if model["asynchronous"] else "synchronous"
    plan = f", {model['plan']}" if model["plan"] else ""
    lines: list[RenderableType] = [_line((f"{model['name']}  ", "bold"), f"{model['layers']} layers, {mode}{plan}")]
    if values:
        words = [f"step {values['step']}", f"loss {values['loss']:.4g}"]
        if "grad_norm" in values:
            words.append(f"grad norm {values['grad_norm']:.3g}")
        if "lr" in values:
            words.append(f"lr {values['lr']:.3g}")
        rates = [
            f"{_count(values[name])} {what}"
            for name, what in (("tokens_per_s", "tok/s"), ("items_per_s", "items/s"))
            if name in values
        ]
        took = f"{_ms(values['step_s'] * 1e3)} a step"
        forms = [*words, *rates, took], [*words, *rates[:1], took]
        lines.append(_Fitting(*(_line("  " + "   ".join(form)) for form in forms)))
    optimizer = model["optimizer"]
    if optimizer["step"] >= 0:
        took = _ms(values["optimizer_s"] * 1e3) if values else "-"
        lines.append(_Fitting(*(_line(_optimizer(optimizer, size) + f", {took} a step") for size in (20, 10))))
    bubbles = model["bubbles"]
    if bubbles is not None:
        head = f"  bubbles of step {bubbles['iteration']}  {bubbles['bubble']:.1%}: "
        shares = [f"{name} {bubbles[name]:.1%}" for name in ("fill", "switch", "intra", "drain")]
        lines.append(_Fitting(*(_line(head + gap.join(shares)) for gap in ("   ", " "))))
    return lines


def _optimizer(optimizer: dict[str, int], size: int) -> str:
    units, of = optimizer["units"], optimizer["of"]
    bar = "=" * round(size * units / max(1, of))
    return f"  optimizer  step {optimizer['step']} [{bar:{size}}] {units} of {of} units"


def _ms(value: float) -> str:
    return f"{value / 1e3:.1f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def _bytes(value: float) -> str:
    size, unit = _unit(value)
    return f"{value:.0f} B" if size == 1 else f"{value / size:.1f} {unit}"


def _unit(value: float) -> tuple[int, str]:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return size, unit
    return 1, "B"


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value >= 1e7 else f"{value / 1e6:.2f} MB/s"


def _count(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 10_000 else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
