"""Turning an exception into what travels to the script."""

from __future__ import annotations

import linecache
import os
import sys
import traceback

import cloudpickle

from rpruntime.wire.messages import ErrorInfo

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MAX_TEXT = 64 << 10


def describe(
    err: BaseException, *, phase: str = "", layer: int = -1, layer_name: str = "", microbatch: int = -1, device: str = ""
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
    """The exception if it survives a round trip, else its class alone, else nothing."""
    bare = err.with_traceback(None) if sys.version_info < (3, 11) else err
    for candidate in (bare, type(err)):
        try:
            data = cloudpickle.dumps(candidate)
            cloudpickle.loads(data)
        except Exception:
            continue
        if len(data) <= 4 * _MAX_TEXT:
            return bytes(data)
    return b""
