"""The script's end of an exception that was raised in another process."""

from __future__ import annotations

import ast
import linecache
import os
import pickle
import re
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from rpruntime.errors import RoundPipeError
from rpruntime.wire.messages import ErrorInfo, RoleFailedMsg

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_PLUMBING = re.compile(r"torch/(nn/modules/module\.py|autograd/.*|_tensor\.py)$")
"""Frames between a layer and its caller, which say nothing."""
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


@dataclass(frozen=True)
class ErrorContext:
    """Where a user's exception came from: `err.rp_context`.

    `layer` is None where no single layer is to blame; `micro_batch` counts from 0.
    """

    phase: str
    layer: int | None
    layer_name: str
    micro_batch: int | None
    num_microbatches: int
    step: int
    device: str
    log_file: str
    worker_traceback: str
    worker_frames: tuple[tuple[str, int, str, str], ...]

    def line(self) -> str:
        """The context in one line."""
        parts = []
        if self.layer is not None:
            name, _, kind = self.layer_name.partition(" ")
            parts.append(f"layer {self.layer} {kind if name == str(self.layer) else self.layer_name}".rstrip())
        if self.phase:
            parts.append(self.phase)
        if self.micro_batch is not None:
            parts.append(f"micro-batch {self.micro_batch + 1}/{self.num_microbatches}")
        parts.append(f"step {self.step}")
        if self.device:
            parts.append(self.device)
        return ", ".join(parts)

    def outcome(self) -> str:
        """What the exception did to the run."""
        if self.phase == "evaluation":
            return "training state untouched, run usable"
        if self.phase in ("load", "step"):  # not raised by a layer: a process could not do its part
            return "this pipe cannot go on"
        return "this iteration's gradients dropped, run usable"


def raise_role_failure(msg: RoleFailedMsg) -> None:
    """Raise the exception that a worker or the optimizer reported outside a slot."""
    raise rebuild(msg.error, 0, 0)


def rebuild(info: ErrorInfo, num_microbatches: int, step: int) -> BaseException:
    """The exception of an `ErrorInfo`, of its own type where that is possible at all, with `rp_context`."""
    err = _unpickled(info)
    context = ErrorContext(
        phase=info.phase,
        layer=None if info.layer < 0 else info.layer,
        layer_name=info.layer_name,
        micro_batch=None if info.microbatch < 0 else info.microbatch,
        num_microbatches=num_microbatches,
        step=step,
        device=info.device,
        log_file=info.log_file,
        worker_traceback=info.traceback,
        worker_frames=info.frames,
    )
    err.rp_context = context  # type: ignore[attr-defined]
    if not hasattr(err, "add_note"):  # Python 3.10; `format_error` shows them
        notes: list[str] = []
        err.__notes__ = notes
        err.add_note = notes.append  # type: ignore[method-assign, assignment, unused-ignore]
    return err


def _unpickled(info: ErrorInfo) -> BaseException:
    try:
        found = pickle.loads(info.pickled)
    except Exception:
        found = None
    if isinstance(found, BaseException):
        return found
    if isinstance(found, tuple):  # its class and what could be pickled of it
        try:
            kind, args, state = found
            return _put_together(kind, args, state, info.text)
        except Exception:
            pass  # a class that cannot be made without its __init__
    return RoundPipeError(f"{info.type_name}: {info.text}")


def _put_together(
    kind: type[BaseException], args: tuple[object, ...], state: dict[str, object], text: str
) -> BaseException:
    err = kind.__new__(kind, *args)
    err.args = args
    err.__dict__.update(state)
    try:
        same = str(err) == text
    except Exception:
        same = False
    if not same:  # its message needs what had to stay behind
        kind = type(kind.__name__, (kind,), {"__str__": lambda self: text, "__module__": kind.__module__})
        err = kind.__new__(kind, *args)
        err.args = args
        err.__dict__.update(state)
    return err


def format_error(err: BaseException, frames: TracebackType | None, *, debug: bool = False) -> str:
    """What the terminal shows: the script's lines, the worker's lines, the error, the context last."""
    context: ErrorContext = err.rp_context  # type: ignore[attr-defined]
    lines = []
    for frame in traceback.extract_tb(frames):
        if debug or not _is_ours(frame.filename):
            lines.append(_frame(frame.filename, frame.lineno or 0, frame.name, frame.line or ""))
    lines += _worker_lines(context, debug)
    if debug:
        lines.append(context.worker_traceback.rstrip())
    text = "".join(traceback.format_exception_only(type(err), err)).rstrip()
    # Python 3.10 knows no notes.
    missing = [note for note in getattr(err, "__notes__", ()) if str(note) not in text]
    return "\n".join([*lines, text, *map(str, missing), _last_line(context)])


def _is_ours(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_OURS)


def _worker_lines(context: ErrorContext, debug: bool) -> list[str]:
    lines = []
    for filename, number, function, source in context.worker_frames:
        if debug or not _TORCH_PLUMBING.search(filename):
            filename, source = _at_home(filename, number, function, source)
            on = f"   [{context.device}]" if context.device else ""
            lines.append(_frame(filename, number, function, source) + on)
    return lines


def _last_line(context: ErrorContext) -> str:
    hint = f" | log {context.log_file}" if context.log_file else ""
    return f"  {context.line()} | {context.outcome()}{hint}"


def _at_home(filename: str, number: int, function: str, source: str) -> tuple[str, str]:
    """A worker's frame with what only the script knows: (file, source line).

    What is defined in the script travels by value and has lost its file. It is the script's if the script has a
    function of that name at that line.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    lost = filename.startswith("<")
    if script and (function in _functions_at(script, number) if lost else os.path.abspath(script) == filename):
        return script, source or linecache.getline(script, number).strip()
    return ("" if lost else filename), source


def _functions_at(filename: str, number: int) -> set[str]:
    """Names of the functions that have this line."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {
        "<lambda>" if isinstance(node, ast.Lambda) else node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        and node.lineno <= number <= (node.end_lineno or node.lineno)
    }


def _frame(filename: str, number: int, function: str, source: str) -> str:
    place = os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else filename
    place = f"{_INSTALLED.sub('', place)}:{number}" if filename else f"line {number}"
    where = "" if function == "<module>" else f"in {function}"
    return "   ".join(part for part in (f"  {place}", ": ".join(word for word in (where, source) if word)) if part)


def install_excepthook() -> None:
    """Show exceptions with an `rp_context` in the short form, and this package's own without its lines and without
    others of them that came before; everything else goes where it went before, such exceptions that it was raised from
    or beside with what the short form has.
    """
    if getattr(sys.excepthook, "_rpruntime", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], err: BaseException, frames: TracebackType | None) -> None:
        debug = os.environ.get("RPRUNTIME_DEBUG") == "1"
        if not hasattr(err, "rp_context"):
            for earlier in _chain(err):
                if hasattr(earlier, "rp_context"):
                    _explain(earlier, debug)
            if isinstance(err, RoundPipeError) and not debug:
                frames = err.__traceback__ = _without_ours(frames)
                if err.__cause__ is None and all(isinstance(earlier, RoundPipeError) for earlier in _chain(err)):
                    err.__suppress_context__ = True
            before(kind, err, frames)
            return
        print(format_error(err, frames, debug=debug), file=sys.stderr)

    hook._rpruntime = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _chain(err: BaseException) -> list[BaseException]:
    """What a traceback shows above this exception."""
    found: dict[int, BaseException] = {}
    while True:
        earlier = err.__cause__
        if earlier is None and not err.__suppress_context__:
            earlier = err.__context__
        if earlier is None or id(earlier) in found:  # chains made by hand may go round
            return list(found.values())
        found[id(earlier)] = err = earlier


def _explain(err: BaseException, debug: bool) -> None:
    """Let a usual traceback of this exception show the worker's lines and the context, and none of ours."""
    if not debug:
        err.__traceback__ = _without_ours(err.__traceback__)
    context: ErrorContext = err.rp_context  # type: ignore[attr-defined]
    note = "\n".join([*_worker_lines(context, debug), _last_line(context)])
    if note not in getattr(err, "__notes__", ()):  # a script may call the hook itself
        err.add_note(note)  # type: ignore[attr-defined, unused-ignore]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    links = []
    while trace is not None:
        if not _is_ours(trace.tb_frame.f_code.co_filename):
            links.append(trace)
        trace = trace.tb_next
    found = None
    for link in reversed(links):
        found = TracebackType(found, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return found
