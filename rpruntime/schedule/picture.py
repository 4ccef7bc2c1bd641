"""A simulation as a picture (SVG) of the devices over time, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from rpruntime.schedule.simulation import Simulation

COLORS = {"forward": "#6aa6e8", "fused": "#c58be0", "backward": "#f2a65a"}
LIGHTER = {"forward": "#9cc5f2", "fused": "#dbb4ee", "backward": "#f8c795"}
_LEFT, _TOP, _ROW, _GAP = 74, 34, 26, 6


def svg(simulation: Simulation, title: str, width: int = 960) -> str:
    """One row a device, one box a micro-batch; boxes wide enough carry the micro-batch's number.

    Neighbouring stages have different shades, so that it shows where one ends; every other iteration is outlined.
    """
    scale = (width - _LEFT - 12) / (simulation.makespan_ms or 1.0)
    height = _TOP + simulation.num_devices * (_ROW + _GAP) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<title>{escape(title)}</title><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for device in range(simulation.num_devices):
        y = _TOP + device * (_ROW + _GAP)
        parts.append(f'<text x="8" y="{y + 17}" font-size="12">device {device}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width - _LEFT - 12}" height="{_ROW}" fill="#eee"/>')
    shade: dict[int, tuple[object, bool]] = {}
    for span in simulation.spans:
        stage = (span.kind, span.layers, span.iteration)
        before, light = shade.get(span.device, (None, True))
        light = light if stage == before else not light
        shade[span.device] = (stage, light)
        color = (LIGHTER if light else COLORS).get(span.kind, "#bbb")
        x, y = _LEFT + span.start_ms * scale, _TOP + span.device * (_ROW + _GAP)
        wide = (span.end_ms - span.start_ms) * scale
        edge = "#555" if span.iteration % 2 else "#fff"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW}" fill="{color}" stroke="{edge}" '
            f'stroke-width="{min(0.8, wide / 6):.2f}"/>'
        )
        if wide >= 9:
            parts.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + 17}" font-size="10" text-anchor="middle">'
                f"{span.microbatch}</text>"
            )
    y = height - 20
    x = _LEFT
    for kind in [kind for kind in COLORS if any(span.kind == kind for span in simulation.spans)]:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}" font-size="12">{kind}</text>')
        x += 90
    parts.append(
        f'<text x="{width - 12}" y="{y}" font-size="12" text-anchor="end">'
        f"{simulation.makespan_ms:.4g} ms, {100 * simulation.bubble:.1f}% idle (grey)</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as the object to write as JSON; a device is a process with a row for compute and one for uploads."""
    events: list[dict[str, Any]] = []
    for device in range(simulation.num_devices):
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}})
        for thread, name in enumerate(("compute", "weights")):
            events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": name}})
    for thread, spans in enumerate((simulation.spans, simulation.uploads)):
        for span in spans:
            layers = f"{span.layers.start}-{span.layers.stop - 1}"
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.kind} {layers}" + (f" mb {span.microbatch}" if span.microbatch >= 0 else ""),
                    "cat": span.kind,
                    "pid": span.device,
                    "tid": thread,
                    "ts": span.start_ms * 1e3,
                    "dur": (span.end_ms - span.start_ms) * 1e3,
                    "args": {"layers": layers, "micro_batch": span.microbatch, "iteration": span.iteration},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
