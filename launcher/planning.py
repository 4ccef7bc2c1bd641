"""rpctl plan and rpctl simulate: stages for measured layers, and schedules compared on paper. Starts nothing.

Layer times come from a file such as scripts/data/layer_times_h200.json, or from two lists. `rpctl plan` takes a model
too, a folder or MODULE:FACTORY, and says what it will need (launcher/estimating.py; only that needs torch).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rpruntime.errors import ConfigError
from rpruntime.schedule import (
    SCHEDULES,
    DeadlockError,
    ExecutionPlan,
    Simulation,
    bound_plan,
    formula_plan,
    partition,
    simulate,
)
from rpruntime.schedule.costs import LayerTimes, numbers
from rpruntime.schedule.packing import Cut
from rpruntime.schedule.picture import chrome_trace, svg
from rpruntime.schedule.search import Score

if TYPE_CHECKING:
    from launcher.estimating import ModelEstimate


def plan(words: list[str]) -> int:
    """`rpctl plan`; returns the exit code: 2, with one line, for a bad file or setting."""
    return _command(_plan, _plan_parser(), words)


def simulate_schedules(words: list[str]) -> int:
    """`rpctl simulate`; as `plan`."""
    return _command(_simulate, _simulate_parser(), words)


def _command(run: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, words: list[str]) -> int:
    try:
        run(parser.parse_args(words))
    except (ConfigError, DeadlockError) as err:
        print(f"{parser.prog}: {err}", file=sys.stderr)
        return 2
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"rpctl {command}", description=description)
    parser.add_argument("file", nargs="?", type=Path, help="layer times, as scripts/data/layer_times_h200.json")
    parser.add_argument("--model", help="which of the file's models")
    parser.add_argument("--forward-ms", type=_times, metavar="MS,MS*N,...", help="instead of a file: 2.5*28,15")
    parser.add_argument("--backward-ms", type=_times, metavar="MS,...", help="the recomputation included")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--microbatches", type=int, default=16, metavar="M", help="default 16")
    parser.add_argument("--hop-ms", type=float, metavar="MS", help="between devices; default: the file's bytes, or 0")
    parser.add_argument("--link-gb-per-s", type=float, metavar="GB", help="each device's link to the host")
    parser.add_argument("--tokens-per-microbatch", type=int, metavar="T", help="default: the file's micro-batch")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _plan_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "plan",
        "Cuts layers into stages, and says what to expect of them: of measured layers, or of a MODEL (a folder with "
        "config.json, or MODULE:FACTORY giving an nn.Module), whose memory is estimated too. Nothing is started.",
    )
    parser.add_argument("--asynchronous", action="store_true", help="the plan for overlapping iterations")
    parser.add_argument("--formula", action="store_true", help="the paper's objective instead of simulation")
    model = parser.add_argument_group("of a MODEL")
    model.add_argument("--batch", type=int, metavar="B", help="rows of a batch; default: one a micro-batch")
    model.add_argument("--seq", type=int, default=2048, metavar="S", help="tokens of a row; default 2048")
    model.add_argument("--input", metavar="SHAPE[:DTYPE]", help="a whole batch, as 64,3,224,224 or 64,2048:int64")
    model.add_argument("--dtype", help="as RoundPipe's: bfloat16; default: the model's own")
    model.add_argument("--optimizer", default="adamw", metavar="NAME", help="of torch.optim, or none; default adamw")
    model.add_argument("--plan", choices=("auto", "layers"), default="auto", help="as RoundPipe's; default auto")
    model.add_argument("--tflops", type=float, metavar="T", help="of a device; default: measured on this machine's")
    model.add_argument("--measure", action="store_true", help="time each kind of layer on this machine's device")
    return parser


def _simulate_parser() -> argparse.ArgumentParser:
    parser = _parser("simulate", "Compares all schedules on the same layers.")
    parser.add_argument("--iterations", type=int, default=1, metavar="K", help="default 1")
    parser.add_argument("--asynchronous", action="store_true", help="iterations overlap, one step behind")
    parser.add_argument("--schedule", choices=SCHEDULES, default="roundpipe", help="of the trace and the picture")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for Perfetto or chrome://tracing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of the devices over time, .svg or .png")
    return parser


def _times(text: str) -> list[float]:
    """`2.5*3,15` is 2.5, 2.5, 2.5, 15."""
    times: list[float] = []
    for word in text.split(","):
        value, _, count = word.partition("*")
        try:
            times += [float(value)] * (int(count) if count else 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is neither a time such as 2.5 nor 2.5*28") from None
    return times


# --- what is known of the layers


@dataclass(frozen=True)
class _Layers:
    names: list[str]
    forward_ms: list[float]
    backward_ms: list[float]
    """With the recomputation."""
    param_bytes: list[float] | None = None
    boundary_bytes: float | None = None
    tokens: int | None = None


def _layers(options: argparse.Namespace) -> _Layers:
    lists = options.forward_ms is not None or options.backward_ms is not None
    if lists == (options.file is not None):
        raise ConfigError("give either a file of layer times or --forward-ms and --backward-ms")
    if lists:
        if options.forward_ms is None or options.backward_ms is None:
            raise ConfigError("--forward-ms and --backward-ms go together")
        names = [f"layer {index}" for index in range(len(options.forward_ms))]
        return _Layers(names, options.forward_ms, options.backward_ms)
    try:
        body = json.loads(options.file.read_text())
    except OSError as err:
        raise ConfigError(f"cannot read {options.file}: {err.strerror}") from None
    except ValueError as err:
        raise ConfigError(f"{options.file} is not JSON: {err}") from None
    return _from_file(body, options.file, options.model)


def _from_file(body: Any, path: Path, wanted: str | None) -> _Layers:
    models = body.get("models") if isinstance(body, dict) else None
    if not isinstance(models, dict) or not models:
        raise ConfigError(f'{path} has no "models"; scripts/data/layer_times_h200.json shows the form')
    if wanted is None and len(models) > 1:
        raise ConfigError(f"{path} has several models: choose with --model {'|'.join(models)}")
    name = wanted if wanted is not None else next(iter(models))
    if name not in models:
        raise ConfigError(f"{path} has no model {name}, only {', '.join(models)}")
    try:
        layers = models[name]["layers"]
        names = [str(layer.get("name", f"layer {index}")) for index, layer in enumerate(layers)]
        forward = list(numbers("fwd_ms", [layer["fwd_ms"] for layer in layers]))
        backward = numbers("bwd_ms", [layer["bwd_ms"] for layer in layers])
        sizes = None
        if all("param_bytes" in layer for layer in layers):
            sizes = list(numbers("param_bytes", [layer["param_bytes"] for layer in layers]))
        boundary = models[name].get("boundary_bytes")
        if boundary is not None:
            (boundary,) = numbers("boundary_bytes", [boundary])
        rows, length = body.get("micro_batch", (0, 0))
        tokens = int(rows) * int(length) or None
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        if isinstance(err, ConfigError):
            raise ConfigError(f"{path}, model {name}: {err}") from None
        missing = f"there is no {err}" if isinstance(err, KeyError) else str(err)
        raise ConfigError(f"{path}, model {name}, is not in the form of layer_times_h200.json: {missing}") from None
    with_recompute = [f + b for f, b in zip(forward, backward, strict=True)]
    return _Layers(names, forward, with_recompute, sizes, boundary, tokens)


@dataclass(frozen=True)
class _Setting:
    layers: _Layers
    hop_ms: float
    link: float | None
    tokens: int | None
    devices: int
    microbatches: int

    @classmethod
    def of(cls, options: argparse.Namespace, layers: _Layers | None = None) -> _Setting:
        layers, link = layers or _layers(options), options.link_gb_per_s
        if link is not None and not link > 0:
            raise ConfigError(f"--link-gb-per-s must be above 0, not {link}")
        hop_ms = options.hop_ms
        if hop_ms is None:
            to_host_and_back = 2 * (layers.boundary_bytes or 0.0)
            hop_ms = to_host_and_back / (link * 1e6) if link is not None else 0.0
        tokens = layers.tokens if options.tokens_per_microbatch is None else options.tokens_per_microbatch
        if tokens is not None and tokens < 1:
            raise ConfigError(f"--tokens-per-microbatch must be at least 1, not {tokens}")
        return cls(layers, hop_ms, link, tokens, options.devices, options.microbatches)

    def simulate(self, plan: ExecutionPlan, schedule: str, iterations: int, asynchronous: bool) -> Simulation:
        sizes = self.layers.param_bytes
        return simulate(
            plan,
            self.layers.forward_ms,
            self.layers.backward_ms,
            num_devices=self.devices,
            num_microbatches=self.microbatches,
            schedule=schedule,
            asynchronous=asynchronous,
            iterations=iterations,
            hop_ms=self.hop_ms,
            param_bytes=sizes if self.link is not None else None,
            link_gb_per_s=self.link if sizes is not None else None,
        )

    def partition(self, asynchronous: bool) -> ExecutionPlan:
        return partition(
            self.layers.forward_ms,
            self.layers.backward_ms,
            num_devices=self.devices,
            num_microbatches=self.microbatches,
            hop_ms=self.hop_ms,
            asynchronous=asynchronous,
        )

    def tokens_per_s(self, iteration_ms: float) -> float | None:
        if self.tokens is None or iteration_ms <= 0:
            return None
        return self.tokens * self.microbatches / iteration_ms * 1e3


# --- rpctl plan


def _names_model(file: Path | None) -> bool:
    """Whether the argument is a model, not a file of layer times."""
    return file is not None and (file.is_dir() or (":" in str(file) and not file.exists()))


def _layers_of_model(model: ModelEstimate) -> _Layers:
    boundary = max((cost.input_bytes for cost in model.costs[1:]), default=0)
    names = [cost.name for cost in model.costs]
    return _Layers(names, model.forward_ms, model.backward_ms, model.param_bytes, float(boundary), model.tokens)


def _step_text(iteration_ms: float, model: ModelEstimate | None) -> str:
    if model is None or model.optimizer_ms is None:
        return f"{iteration_ms:.1f} ms an iteration before the optimizer's step"
    both = max(iteration_ms, model.optimizer_ms) if model.asynchronous else iteration_ms + model.optimizer_ms
    return f"{iteration_ms:.1f} ms an iteration, the optimizer's step {model.optimizer_ms:.1f} ms, together {both:.1f}"


def _plan(options: argparse.Namespace) -> None:
    model = None
    if _names_model(options.file):
        from launcher.estimating import estimate_model

        model = estimate_model(options)
    setting = _Setting.of(options, None if model is None else _layers_of_model(model))
    layers = setting.layers
    if options.formula:
        chosen = formula_plan(
            layers.forward_ms,
            layers.backward_ms,
            num_devices=setting.devices,
            num_microbatches=setting.microbatches,
        )
    elif options.plan == "layers":
        chosen = ExecutionPlan.one_layer_a_stage(len(layers.names))
    else:
        chosen = setting.partition(options.asynchronous)
    stages = _describe_stages(chosen, setting)
    iteration_ms, bubble = _expected(chosen, setting, options.asynchronous)
    tokens_per_s = setting.tokens_per_s(iteration_ms)
    warnings = [_warning(stage) for stage in stages if stage["transfer_ms"] > stage["compute_ms"] > 0]
    if options.json:
        found = {
            "forward": [[stage.start, stage.stop] for stage in chosen.forward],
            "backward": [[stage.start, stage.stop] for stage in chosen.backward],
            "stages": stages,
            "iteration_ms": iteration_ms,
            "bubble": bubble,
            "tokens_per_s": tokens_per_s,
            "warnings": warnings,
            **({} if model is None else {"model": model.as_json(chosen)}),
        }
        print(json.dumps(found, indent=1))
        return
    if model is not None:
        print("\n".join(model.lines(chosen)))
    print(f"{len(layers.names)} layers, {setting.devices} devices, {setting.microbatches} micro-batches")
    print(f"{'stage':<6} {'kind':<9} {'layers':<9} {'ms a micro-batch':>16} {'device':>7}")
    for number, stage in enumerate(stages):
        where = f"{stage['layers'][0]}-{stage['layers'][1] - 1}"
        print(f"{number:<6} {stage['kind']:<9} {where:<9} {stage['ms']:>16.2f} {number % setting.devices:>7}")
    rate = f", {tokens_per_s:,.0f} tokens/s" if tokens_per_s is not None else ""
    mode = "asynchronous" if options.asynchronous else "synchronous"
    print(f"{mode}: {_step_text(iteration_ms, model)}, bubble {100 * bubble:.1f}%{rate}")
    print(f"rp.ExecutionPlan(forward={list(chosen.forward)}, backward={list(chosen.backward)})")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _describe_stages(chosen: ExecutionPlan, setting: _Setting) -> list[dict[str, Any]]:
    """Each stage with its times over all micro-batches: compute, and the busier direction of the link."""
    layers, times = setting.layers, LayerTimes.of(setting.layers.forward_ms, setting.layers.backward_ms)
    found: list[dict[str, Any]] = []
    for number, stage in enumerate([*chosen.forward, *chosen.backward]):
        kind = "forward" if number < len(chosen.forward) else "fused" if number == len(chosen.forward) else "backward"
        sums = times.forward_sum if kind == "forward" else times.backward_sum
        ms = sums[stage.stop] - sums[stage.start]
        transfer_ms = 0.0
        if setting.link is not None:
            weights = sum(layers.param_bytes[stage.start : stage.stop]) if layers.param_bytes is not None else 0.0
            boundary = setting.microbatches * (layers.boundary_bytes or 0.0)
            up = weights + boundary * (2 if kind == "backward" else 1)  # backward: the input and the output's gradient
            down = boundary if kind == "forward" else weights + boundary
            transfer_ms = max(up, down) / (setting.link * 1e6)
        found.append(
            {
                "kind": kind,
                "layers": [stage.start, stage.stop],
                "ms": ms,
                "compute_ms": ms * setting.microbatches,
                "transfer_ms": transfer_ms,
            }
        )
    return found


def _warning(stage: dict[str, Any]) -> str:
    first, stop = stage["layers"]
    return (
        f"{stage['kind']} stage {first}-{stop - 1}: transfers take {stage['transfer_ms']:.1f} ms, compute "
        f"{stage['compute_ms']:.1f} ms; use more or larger micro-batches, or the link sets the pace"
    )


def _expected(chosen: ExecutionPlan, setting: _Setting, asynchronous: bool) -> tuple[float, float]:
    """Milliseconds an iteration and its bubble; asynchronous: once the pipeline is full."""
    if not asynchronous:
        found = setting.simulate(chosen, "roundpipe", 1, False)
        return found.makespan_ms, found.bubble
    layers = setting.layers
    times = LayerTimes.of(layers.forward_ms, layers.backward_ms)
    cut = Cut(
        (0, *(stage.stop for stage in chosen.forward)),
        (times.num_layers, *(stage.start for stage in chosen.backward)),
    )
    stage_ms = cut.stage_ms(times)
    iteration_ms = Score(times, setting.devices, setting.microbatches, setting.hop_ms, True).exact(stage_ms)
    total = iteration_ms * setting.devices
    return iteration_ms, 1 - sum(stage_ms) * setting.microbatches / total if total else 0.0


# --- rpctl simulate


def _simulate(options: argparse.Namespace) -> None:
    setting = _Setting.of(options)
    found: dict[str, tuple[ExecutionPlan, Simulation]] = {}
    refused: dict[str, str] = {}
    for schedule in SCHEDULES:
        try:
            found[schedule] = _best(schedule, setting, options.iterations, options.asynchronous)
        except ConfigError as err:
            if schedule == "roundpipe":
                raise
            refused[schedule] = str(err)
    if options.json:
        rows = {name: _row(setting, *entry, options.iterations) for name, entry in found.items()}
        print(json.dumps({"schedules": rows, "refused": refused}, indent=1))
    else:
        _print_table(setting, found, refused, options.iterations)
    if options.trace is None and options.picture is None:
        return
    if options.schedule not in found:
        raise ConfigError(f"no trace or picture of {options.schedule}: {refused[options.schedule]}")
    chosen = found[options.schedule][1]
    if options.trace is not None:
        _write(options.trace, json.dumps(chrome_trace(chosen)).encode())
    if options.picture is not None:
        title = f"{options.schedule}, {setting.devices} devices, {setting.microbatches} micro-batches"
        _write(options.picture, _picture(options.picture, svg(chosen, title)))


def _best(schedule: str, setting: _Setting, iterations: int, asynchronous: bool) -> tuple[ExecutionPlan, Simulation]:
    """The schedule under its best plan: for the looped ones, the best number of stages a device."""
    layers = setting.layers
    tried: list[tuple[ExecutionPlan, Simulation]] = []
    if schedule == "roundpipe":
        for long_run in dict.fromkeys((asynchronous, False)):  # the plan for many iterations may lose over a few
            plan = setting.partition(long_run)
            tried.append((plan, setting.simulate(plan, schedule, iterations, asynchronous)))
        return min(tried, key=lambda entry: entry[1].makespan_ms)
    looped = schedule in ("interleaved", "looped_bfs")
    most = max(1, len(layers.names) // max(1, setting.devices)) if looped else 1
    for each in range(1, most + 1):
        plan = bound_plan(layers.forward_ms, layers.backward_ms, each * setting.devices)
        try:
            tried.append((plan, setting.simulate(plan, schedule, iterations, asynchronous)))
        except ConfigError:
            if not tried:
                raise
    return min(tried, key=lambda entry: entry[1].makespan_ms)


def _row(setting: _Setting, plan: ExecutionPlan, found: Simulation, iterations: int) -> dict[str, Any]:
    return {
        "stages": f"{len(plan.forward)}+{len(plan.backward)}",
        "makespan_ms": found.makespan_ms,
        "bubble": found.bubble,
        "fill": found.fill,
        "switch": found.switch,
        "intra": found.intra,
        "drain": found.drain,
        "tokens_per_s": setting.tokens_per_s(found.makespan_ms / iterations),
    }


def _print_table(
    setting: _Setting, found: dict[str, tuple[ExecutionPlan, Simulation]], refused: dict[str, str], iterations: int
) -> None:
    print(
        f"{'schedule':<12} {'stages':>7} {'makespan ms':>12} {'bubble %':>9}  = fill + switch + intra + drain", end=""
    )
    print("   tokens/s" if setting.tokens is not None else "")
    for name in SCHEDULES:
        if name in refused:
            print(f"{name:<12} not possible: {refused[name]}")
            continue
        row = _row(setting, *found[name], iterations)
        parts = " ".join(f"{100 * row[key]:7.2f}" for key in ("fill", "switch", "intra", "drain"))
        rate = f" {row['tokens_per_s']:11,.0f}" if row["tokens_per_s"] is not None else ""
        print(f"{name:<12} {row['stages']:>7} {row['makespan_ms']:>12.1f} {100 * row['bubble']:>9.2f}  {parts}{rate}")


def _picture(path: Path, drawing: str) -> bytes:
    if path.suffix == ".svg":
        return drawing.encode()
    if path.suffix != ".png":
        raise ConfigError(f"--picture {path}: the name must end in .svg or .png")
    try:
        import cairosvg  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, OSError):
        raise ConfigError("a PNG picture needs the library cairosvg (pip install cairosvg); .svg needs none") from None
    drawn: bytes = cairosvg.svg2png(bytestring=drawing.encode(), scale=2)
    return drawn


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as err:
        raise ConfigError(f"cannot write {path}: {err.strerror}") from None
