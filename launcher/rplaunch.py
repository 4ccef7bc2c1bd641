"""rplaunch: runs a script once, with one process per device and the optimizer's process at its side.

    rplaunch [flags] script.py [arguments]

The script stays in the terminal's foreground group, so Ctrl-C reaches it as under plain python. rplaunch
survives it: interrupts within two seconds of the first count as one, a later one ends everything. Other
signals are passed on to the script; the children live until it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.launch import Launcher
    from launcher.plan import Plan
    from launcher.screen import Screen
    from launcher.wakeup import Wakeup
    from rpruntime.flags import CommandLine

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPT_WINDOW_S = 2.0
_ACK_WAIT_S = 0.3


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    early: list[float] = []
    if before is signal.default_int_handler:
        # From here on an interrupt waits for its turn instead of cutting an import in two.
        signal.signal(signal.SIGINT, lambda *_: early.append(time.monotonic()))
    try:
        return _main(sys.argv[1:] if argv is None else argv, early)
    finally:
        signal.signal(signal.SIGINT, before)


def _main(argv: list[str], early: list[float]) -> int:
    from launcher.screen import hold_standard_descriptors
    from rpruntime import flags

    hold_standard_descriptors()
    try:
        line = flags.parse(argv)
        settings = flags.settings(line.given)
    except flags.UsageError as err:
        return _refuse(2, str(err), "see rplaunch --help")
    if line.help:
        return _print(flags.help_text())
    if line.version:
        import rpruntime

        return _print(f"rpruntime {rpruntime.__version__}")
    if not line.target and not line.dry_run:
        return _refuse(2, "which script? rplaunch [flags] script.py [arguments]", "see rplaunch --help")
    if line.target and not line.module and not os.path.exists(line.target):
        return _refuse(2, f"there is no file {line.target}")

    from launcher.plan import make_plan, script_path_entry
    from launcher.screen import Screen
    from launcher.wakeup import Wakeup
    from rpruntime.errors import RoundPipeError

    screen = Screen(settings["quiet"])
    wakeup = Wakeup()
    wakeup.install((signal.SIGINT, *PASSED_ON, signal.SIGCHLD))
    wakeup.received += [(signal.SIGINT, when) for when in early]
    try:
        path_entry = [script_path_entry(line.target, line.module)] if line.target else []
        plan = make_plan(settings, path_entry)
        if line.dry_run:
            return _dry_run(line, plan)
        return _launch(line, plan, screen, wakeup)
    except (RoundPipeError, OSError) as err:
        return _refuse(1, str(err))
    finally:
        wakeup.close()


def _refuse(code: int, *sentences: str) -> int:
    from launcher.screen import Screen

    Screen().warn("rplaunch: " + "; ".join(sentences))
    return code


def _print(text: str) -> int:
    """To stdout; the exit code is 1 if that is full, and 0 if nobody reads on (`rplaunch --help | head -1`)."""
    from launcher.screen import write

    error = write(sys.stdout, text + "\n")
    if error is not None and not isinstance(error, BrokenPipeError):
        return _refuse(1, f"cannot write the output: {error}")
    return 0


def _launch(line: CommandLine, plan: Plan, screen: Screen, wakeup: Wakeup) -> int:
    from launcher.plan import begin_session

    words = [*(["-m"] if line.module else []), line.target, *line.arguments]
    folder = begin_session(plan, screen, {"argv": words})
    # Only now, as ZeroMQ and the messages take a while to import: the first line is on the screen by then.
    from launcher.launch import Launcher

    launcher = Launcher(plan, folder, screen, wakeup)
    run = None
    try:
        # The children first: they take seconds to import torch, and the script does so meanwhile.
        launcher.start()
        ended_early = _asked_to_end(wakeup)
        if ended_early is not None:
            return 128 + ended_early
        run = ScriptRun(launcher, wakeup, screen, words, plan.config["shutdown_timeout"])
        return run.wait()
    finally:
        launcher.end(at_once=run is None or run.in_a_hurry)


def _asked_to_end(wakeup: Wakeup) -> signal.Signals | None:
    """The signal that came before there was a script to get it."""
    for number, _ in wakeup.received:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return number
    return None


def _dry_run(line: CommandLine, plan: Plan) -> int:
    from launcher.screen import devices_line
    from rpruntime.store.limits import figures, read_host_memory

    memory = read_host_memory()
    lines = [devices_line(plan.devices, memory), f"memory   {figures(memory, plan.config['host_memory'])}"]
    for role, device in plan.roles:
        if device is None:
            lines.append(f"start    {role}: {plan.config['optimizer_threads']} threads, sees no GPU")
        else:
            sees = f"CUDA_VISIBLE_DEVICES={device.token}" if device.is_cuda else "sees no GPU"
            lines.append(
                f"start    {role}: {device.name} {device.model}".rstrip()
                + f", {plan.config['threads_per_worker']} threads, {sees}"
            )
    if line.target:
        lines.append("script   " + " ".join((["-m"] if line.module else []) + [line.target, *line.arguments]))
    return _print("\n".join(lines))


class ScriptRun:
    """The script's process, and what signals to rplaunch mean for it."""

    def __init__(self, launcher: Launcher, wakeup: Wakeup, screen: Screen, words: list[str], grace_s: float) -> None:
        import subprocess

        self._launcher = launcher
        self._wakeup = wakeup
        self._screen = screen
        self._grace_s = grace_s
        self.in_a_hurry = False
        """Everything is to end at once."""
        self._first_interrupt: float | None = None
        # When an interrupt is sent on, unless the script says before that it got it itself.
        self._forward_at: float | None = None
        # (when the grace of SIGTERM is over, exit code then)
        self._forced: tuple[float, int] | None = None
        self._forced_code: int | None = None
        self._ack, ack_write = os.pipe()
        os.set_blocking(self._ack, False)
        runner = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_script.py")
        environ = {**os.environ, "RPRUNTIME_SESSION": str(launcher.folder.path)}
        if launcher.folder.config["debug"]:
            environ["RPRUNTIME_DEBUG"] = "1"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(
                [sys.executable, runner, str(ack_write), *words], env=environ, pass_fds=(ack_write,)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(ack_write)
        self._started = time.monotonic()
        launcher.folder.script["pid"] = self._popen.pid
        launcher.folder.save()

    def wait(self) -> int:
        """Run the loop until the script has ended; returns the exit code."""
        ack_open = True
        while self._popen.poll() is None:
            ready = self._launcher.turn((self._ack,) if ack_open else (), self._timeout())
            if self._ack in ready:
                ack_open = self._read_ack()
            for number, when in self._wakeup.take():
                self._on_signal(number, when)
            self._on_time()
        code = self._popen.returncode
        os.close(self._ack)
        if self._forced_code is not None:
            return self._forced_code
        return code if code >= 0 else 128 - code

    def _timeout(self) -> float:
        due = [when for when in (self._forward_at, self._forced[0] if self._forced else None) if when is not None]
        return max(0.0, min([0.2, *(when - time.monotonic() for when in due)]))

    def _read_ack(self) -> bool:
        try:
            data = os.read(self._ack, 64)
        except BlockingIOError:
            return True
        if data:
            self._forward_at = None
        return bool(data)

    def _on_signal(self, number: signal.Signals, when: float) -> None:
        if number in PASSED_ON:
            self._popen.send_signal(number)
            if number in (signal.SIGTERM, signal.SIGHUP) and self._forced is None:
                self._forced = (when + self._grace_s, 128 + number)
        elif number == signal.SIGINT:
            if self._first_interrupt is None:
                self._first_interrupt = when
                if when <= self._started:
                    self._forward_at = when  # the group had no script in it yet
                elif not _has_foreground():
                    # `kill -INT` of rplaunch alone? Ctrl-C and signals to the group reach the script
                    # themselves.
                    self._forward_at = when + _ACK_WAIT_S
            elif when - self._first_interrupt >= INTERRUPT_WINDOW_S and not self.in_a_hurry:
                self._screen.say("rpruntime: interrupted again: ending everything")
                self._end_script(130)

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._forward_at is not None and now >= self._forward_at:
            self._forward_at = None
            self._popen.send_signal(signal.SIGINT)
        if self._forced is not None and now >= self._forced[0]:
            code = self._forced[1]
            self._forced = None
            self._screen.warn(f"rpruntime: the script did not end within {self._grace_s:g} s of the signal: killed")
            self._end_script(code)

    def _end_script(self, code: int) -> None:
        self.in_a_hurry = True
        self._forced_code = code
        self._popen.kill()


def _has_foreground() -> bool:
    """Whether a terminal's Ctrl-C goes to our process group."""
    for fd in (0, 2, 1):
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        except OSError:
            continue
    return False


if __name__ == "__main__":
    sys.exit(main())
