"""A trace as a picture (SVG): for each device its computation and its four kinds of copies, then the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from xml.sax.saxutils import escape

from rpruntime.schedule.picture import COLORS, LIGHTER
from rpruntime.trace.chrome import TraceData
from rpruntime.trace.spans import COMPUTE, COPIES, OPTIMIZER, TraceSpan

_COPY_COLORS = dict(zip(COPIES, ("#7d8a99", "#59a98c", "#8cc9a1", "#b08d6a"), strict=True))
_STEP_COLORS = {"G_cp": "#b08d6a", "norm": "#d9c27e", "step and P_cp": "#d98a8a"}
_OTHER = "#bbb"
_LEFT, _TOP, _ROW, _THIN, _GAP = 100, 34, 26, 5, 8
_SMALLEST = 0.15
"""Pixels; a copy that is shorter cannot be seen."""


def last_iterations(data: TraceData, count: int) -> tuple[float, float]:
    """(start, end) in ms of the newest `count` iterations that devices computed; all of it where there is none."""
    spans = [span for span in data.spans if span.stream == COMPUTE and span.iteration >= 0]
    newest = sorted({span.iteration for span in spans})[-count:]
    chosen = [span for span in spans if span.iteration in newest] or data.spans
    return min((s.start_ms for s in chosen), default=0.0), max((s.end_ms for s in chosen), default=0.0)


def svg(data: TraceData, begin: float, end: float, width: int = 1200) -> str:
    """The picture of what lies between `begin` and `end` (ms)."""
    inside = [
        replace(span, start_ms=max(span.start_ms, begin), end_ms=min(span.end_ms, end))
        for span in data.spans
        if span.end_ms > begin and span.start_ms < end
    ]
    scale = (width - _LEFT - 12) / ((end - begin) or 1.0)
    block = _ROW + len(COPIES) * _THIN + _GAP
    has_optimizer = any(span.stream == OPTIMIZER for span in inside)
    height = _TOP + len(data.devices) * block + (_ROW + _GAP if has_optimizer else 0) + 54
    title = f"rpruntime, session {data.session}: {_seconds(end - begin)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<title>{escape(title)}</title><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    y = _TOP
    for role, device in data.devices.items():
        theirs = [span for span in inside if span.role == role]
        parts += _row(y, _ROW, width, device)
        parts += [_box(span, begin, scale, y, _ROW, color) for span, color in _shaded(theirs)]
        for number, stream in enumerate(COPIES):
            top = y + _ROW + 1 + number * _THIN
            copies = [s for s in theirs if s.stream == stream and (s.end_ms - s.start_ms) * scale >= _SMALLEST]
            parts += [_box(span, begin, scale, top, _THIN - 1, _COPY_COLORS[stream]) for span in copies]
        y += block
    if has_optimizer:
        parts += _row(y, _ROW, width, "optimizer")
        steps = [span for span in inside if span.stream == OPTIMIZER]
        parts += [_box(span, begin, scale, y, _ROW, _STEP_COLORS.get(span.name, _OTHER)) for span in steps]
    parts += _legend(height - 30, {"compute": COLORS, "": {**_COPY_COLORS, **_STEP_COLORS}}, inside)
    return "\n".join([*parts, "</svg>", ""])


def _row(y: float, height: float, width: int, name: str) -> list[str]:
    return [
        f'<text x="8" y="{y + 17}" font-size="12">{escape(name)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 12}" height="{height}" fill="#eee"/>',
    ]


def _shaded(spans: Iterable[TraceSpan]) -> list[tuple[TraceSpan, str]]:
    """One box for each micro-batch of a slot; neighbouring slots have different shades."""
    boxes: dict[tuple[int, int], list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.stream == COMPUTE:
            boxes[span.slot, span.microbatch].append(span)
    found: list[tuple[TraceSpan, str]] = []
    before, light = -1, True
    for rows in sorted(boxes.values(), key=lambda rows: min(span.start_ms for span in rows)):
        start, end = min(span.start_ms for span in rows), max(span.end_ms for span in rows)
        layers = (min(span.layers[0] for span in rows), max(span.layers[1] for span in rows))
        light = light if rows[0].slot == before else not light
        before = rows[0].slot
        color = (LIGHTER if light else COLORS).get(rows[0].kind, _OTHER)
        found.append((replace(rows[0], start_ms=start, end_ms=end, layers=layers, name=rows[0].kind), color))
    return found


def _box(span: TraceSpan, begin: float, scale: float, y: float, height: float, color: str) -> str:
    x, wide = _LEFT + (span.start_ms - begin) * scale, (span.end_ms - span.start_ms) * scale
    what = [span.name, _seconds(span.end_ms - span.start_ms)]
    if span.layers[0] >= 0:
        what.append(f"layers {span.layers[0]} to {max(span.layers[0], span.layers[1] - 1)}")
    if span.microbatch >= 0:
        what.append(f"micro-batch {span.microbatch + 1}")
    if span.iteration >= 0:
        what.append(f"step {span.iteration}")
    text = ""
    if wide >= 14 and height == _ROW and span.microbatch >= 0:
        text = f'<text x="{x + wide / 2:.1f}" y="{y + 17}" font-size="10" text-anchor="middle">{span.microbatch}</text>'
    return (
        f'<g><title>{escape(", ".join(what))}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{height}" '
        f'fill="{color}" stroke="#fff" stroke-width="{min(0.6, wide / 8):.2f}"/>{text}</g>'
    )


def _legend(y: float, groups: dict[str, dict[str, str]], spans: Sequence[TraceSpan]) -> list[str]:
    seen = {span.name for span in spans} | {span.kind for span in spans if span.stream == COMPUTE}
    parts, x = [], _LEFT
    for colors in groups.values():
        for name, color in colors.items():
            if name in seen:
                parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
                parts.append(f'<text x="{x + 17}" y="{y}" font-size="12">{escape(name)}</text>')
                x += 30 + 7 * len(name)
    return parts


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 10_000 else f"{ms:.3g} ms"
