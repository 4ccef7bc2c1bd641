"""Turning an exception into what travels to the script."""

from __future__ import annotations

import linecache
import os
import traceback

import cloudpickle

from rpruntime.wire.messages import ErrorInfo

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MAX_TEXT = 64 << 10


def describe(
    err: BaseException,
    *,
    phase: str = "",
    layer: int = -1,
    layer_name: str = "",
    microbatch: int = -1,
    device: str = "",
) -> ErrorInfo:
    """`err` with its place; frames of this package are left out, the full text is kept."""
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name, linecache.getline(frame.filename, frame.lineno or 0).strip())
        for frame in traceback.extract_tb(err.__traceback__)
        if not os.path.abspath(frame.filename).startswith(_OURS + os.sep)
    )
    return ErrorInfo(
        pickled=_pickled(err),
        type_name=type(err).__qualname__,
        text=_text(err)[:_MAX_TEXT],
        traceback="".join(traceback.format_exception(err))[-_MAX_TEXT:],
        frames=frames[-50:],
        phase=phase,
        layer=layer,
        layer_name=layer_name,
        microbatch=microbatch,
        device=device,
        log_file=os.environ.get("RPRUNTIME_LOG", ""),
    )


def _text(err: BaseException) -> str:
    try:
        return str(err)
    except Exception:
        return f"({type(err).__qualname__} without a readable message)"


def _pickled(err: BaseException) -> bytes:
    """The exception if it survives a round trip; else its class with what can be pickled of it; else nothing."""
    try:
        data = cloudpickle.dumps(err)
        if _text(cloudpickle.loads(data)) == _text(err) and len(data) <= 4 * _MAX_TEXT:
            return bytes(data)
    except Exception:
        pass  # its class cannot be made from its arguments, or it carries something that has to stay
    args = err.args if _survives(err.args) else (_text(err),)
    state = {name: value for name, value in err.__dict__.items() if _survives(value)}
    parts = (type(err), args, state)
    return bytes(cloudpickle.dumps(parts)) if _survives(parts) else b""


def _survives(value: object) -> bool:
    try:
        data = cloudpickle.dumps(value)
        cloudpickle.loads(data)
    except Exception:
        return False
    return len(data) <= _MAX_TEXT
