"""Runs the user's script as `python` would, with an interrupt handler in place from the first moment.

    python launcher/run_script.py ACK_FD script.py [arguments]
    python launcher/run_script.py ACK_FD -m module [arguments]

rplaunch starts it with SIGINT blocked, so that an interrupt during Python's own start waits until the handler
is there: it then is a KeyboardInterrupt and exit code 130, not a half-started interpreter. Interrupts within
two seconds of the first are swallowed: someone who hits Ctrl-C five times wants to stop once, and the
script's `except KeyboardInterrupt` must be able to save. Each one that counts is acknowledged on ACK_FD. The
script's globals are the real `__main__`; nothing of ours is in `sys.argv`, `sys.path[0]` or a traceback.
"""

import builtins
import contextlib
import os
import signal
import sys
import time

WINDOW_S = 2.0


def _install_interrupt_handler(ack_fd):
    main_pid = os.getpid()
    first = -float("inf")

    def on_interrupt(number, frame):
        nonlocal first
        if os.getpid() == main_pid:
            now = time.monotonic()
            if now - first < WINDOW_S:
                return
            first = now
            with contextlib.suppress(OSError):  # rplaunch may be gone
                os.write(ack_fd, b"i")
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as Python itself does under nohup
        signal.signal(signal.SIGINT, on_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _find_rpruntime():
    """Where rpruntime is not installed, it is found last on the path."""
    import importlib.util

    if importlib.util.find_spec("rpruntime") is None:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _clear_main():
    names = sys.modules["__main__"].__dict__
    names.clear()
    return names


def _run(words):
    if words[0] == "-m":
        import runpy

        sys.argv = ["-m", *words[2:]]
        sys.path[0] = os.getcwd()
        _find_rpruntime()
        _clear_main().update(__builtins__=builtins, __annotations__={})
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    script = words[0]
    sys.argv = words
    path = os.path.abspath(script)
    if os.path.isdir(path) or not _is_source(path):
        import runpy

        sys.path[0] = path
        _find_rpruntime()
        _clear_main().update(__builtins__=builtins, __annotations__={})
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    _find_rpruntime()
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader("__main__", path)
    names = _clear_main()
    names.update(
        __name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None,
        __annotations__={}, __builtins__=builtins, __file__=path, __cached__=None,
    )  # fmt: skip
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), names)


def _is_source(path):
    """False for a zip file with a __main__.py in it."""
    try:
        with open(path, "rb") as file:
            return file.read(4) != b"PK\x03\x04"
    except OSError:
        return True


def _cut_handler(trace, here):
    """An interrupted script was in its own line, not in our handler."""
    while trace is not None and trace.tb_next is not None:
        if os.path.abspath(trace.tb_next.tb_frame.f_code.co_filename) == here:
            trace.tb_next = None
        trace = trace.tb_next


def _main():
    here = os.path.abspath(__file__)
    ack_fd = int(sys.argv[1])
    os.set_inheritable(ack_fd, False)
    try:
        _install_interrupt_handler(ack_fd)
        _run(sys.argv[2:])
    except SystemExit:
        raise
    except BaseException as err:
        # Print as Python does, without the lines of this file and runpy.
        trace = err.__traceback__
        while trace is not None and (
            os.path.abspath(trace.tb_frame.f_code.co_filename) == here
            or trace.tb_frame.f_globals.get("__name__") == "runpy"
        ):
            trace = trace.tb_next
        _cut_handler(trace, here)
        sys.last_type, sys.last_value, sys.last_traceback = type(err), err, trace
        try:
            sys.excepthook(type(err), err.with_traceback(trace), trace)
        except BaseException:
            sys.__excepthook__(type(err), err, trace)
        code = 130 if isinstance(err, KeyboardInterrupt) else 1
    else:
        code = 0
    # After the except block: there the exception would be kept alive, and its frames with it.
    sys.exit(code)


if __name__ == "__main__":
    # `__main__` becomes the script's: the code that runs it lives in a module without a name of its own.
    import importlib.util

    spec = importlib.util.spec_from_file_location("_run_script", __file__)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    module._main()
