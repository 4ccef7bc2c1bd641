"""The script runs exactly as under plain python, and its exit code is rplaunch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LAUNCH, ROOT, WAIT_READY, Run, rplaunch
from tests.leaks import no_leaks

REST = ["--r=16", "--help", "-n", "2", "--num-gpus", "3", "--", "x"]
TELL = """
import os, sys
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__, __annotations__, __cached__)
print(sys.argv, sys.path[0], os.getcwd(), sorted(globals()), type(__loader__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), {k for k in os.environ if "RPRUNTIME_SESSION" in k})
"""


def _python(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "how", ["script", "module", *(pytest.param(how, marks=pytest.mark.slow) for how in ("folder", "link", "package"))]
)
def test_same_as_python(tmp_path: Path, how: str) -> None:
    scripts = tmp_path / "scripts dir"
    (scripts / "pkg").mkdir(parents=True)
    (scripts / "train.py").write_text(TELL)
    (scripts / "__main__.py").write_text(TELL)
    (scripts / "pkg" / "__init__.py").write_text("")
    (scripts / "pkg" / "mod.py").write_text(TELL)
    (scripts / "pkg" / "__main__.py").write_text(TELL)
    (tmp_path / "link.py").symlink_to(scripts / "train.py")
    words, cwd = {
        "script": (["scripts dir/train.py"], tmp_path),
        "folder": (["scripts dir"], tmp_path),
        "link": (["link.py"], tmp_path),
        "module": (["-m", "pkg.mod"], scripts),
        "package": (["-m", "pkg"], scripts),
    }[how]
    expected = _python([*words, *REST], cwd).stdout.replace("set()", "{'RPRUNTIME_SESSION'}")
    assert repr(REST)[1:-1] in expected
    with no_leaks() as watch:
        run = Run(cwd, watch, [*LAUNCH, "--devices=inline", *words, *REST])
        assert run.wait() == 0, run.err
        assert run.out == expected


@pytest.mark.parametrize(
    "script, code",
    [
        ("", 0),
        ("raise ValueError('of the script')", 1),
        ("import sys; sys.exit(7)", 7),
        pytest.param("import sys; sys.exit('words')", 1, marks=pytest.mark.slow),
        pytest.param("import os; os._exit(3)", 3, marks=pytest.mark.slow),
        pytest.param("def broken(:", 1, marks=pytest.mark.slow),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, marks=pytest.mark.slow),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, marks=pytest.mark.slow),
        ("raise KeyboardInterrupt", 130),
        pytest.param(
            "import threading; threading.Thread(target=print, args=('thread',)).start()", 0, marks=pytest.mark.slow
        ),
        ("import atexit; atexit.register(print, 'atexit')\nraise SystemExit(5)", 5),
    ],
)
def test_exit_code_and_output(tmp_path: Path, script: str, code: int) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--devices=inline", "-q"))
        assert run.wait() == code, run.err
        plain = _python([str(tmp_path / "train.py")], tmp_path)
        assert run.out == plain.stdout
        assert run.err == plain.stderr


def test_traceback_has_no_line_of_ours(tmp_path: Path) -> None:
    script = """
def f():
    return 1 / 0
try:
    f()
except ZeroDivisionError as err:
    raise ValueError("x") from err
"""
    with no_leaks() as watch:
        (tmp_path / "train.py").write_text(script)
        for words in (["train.py"], [str(tmp_path / "train.py")], ["-m", "train"]):
            run = Run(tmp_path, watch, [*LAUNCH, "--devices=inline", "-q", *words])
            assert run.wait() == 1
            expected = _python(words, tmp_path).stderr.splitlines()
            # Python itself shows runpy's lines for -m.
            expected = [line for line in expected if "<frozen runpy>" not in line]
            assert run.err.splitlines() == expected


def test_excepthook_of_the_script(tmp_path: Path) -> None:
    script = "import sys\nsys.excepthook = lambda *args: print('hook', args[0].__name__)\nraise ValueError"
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--devices=inline", "-q"))
        assert run.wait() == 1
        assert run.out == "hook ValueError\n"


def test_spawned_process_finds_the_main_module(tmp_path: Path) -> None:
    script = """
import multiprocessing
def work(x):
    return x + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--devices=inline", "-q"))
        assert run.wait() == 0, run.err
        assert run.out == "[2, 3]\n"


@pytest.mark.parametrize(
    "words, code, sentence",
    [
        (["missing.py"], 2, "there is no file missing.py"),
        ([], 2, "which script?"),
        (["--nonsense", "x.py"], 2, "unknown flag --nonsense"),
        (["-m", "no.such.module"], 1, "No module named"),
        (["--devices=cuda", "x.py"], 1, "CUDA_VISIBLE_DEVICES='' leaves no CUDA device"),
        (["--devices=cpu:99", "x.py"], 1, "from 1 to 64"),
        (["--name=a/b", "x.py"], 1, "--name"),
    ],
)
def test_wrong_lines(tmp_path: Path, words: list[str], code: int, sentence: str) -> None:
    (tmp_path / "x.py").write_text("print('must not run')")
    with no_leaks() as watch:
        run = Run(tmp_path, watch, [*LAUNCH, *words], CUDA_VISIBLE_DEVICES="")
        assert run.wait(5) == code
        assert sentence in run.err
        assert run.out == ""
        if code == 2 or sentence.startswith(("CUDA", "from")):
            assert len(run.err.splitlines()) == 1


def test_first_lines_and_quiet(tmp_path: Path) -> None:
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY + "print('out')")
        assert run.wait() == 0
        first, second = run.err.splitlines()
        assert re.fullmatch(
            r"rpruntime 0\.1  session (\S+)   watch: rpctl top \1   logs: /tmp/rpruntime-\d+/\1/", first
        )
        assert re.fullmatch(
            r"devices  cpu:0, cpu:1 \| host .* GiB.*, shared memory .* free, memlock .*, \d+ cores", second
        )
        assert run.out == "out\n"
        run = rplaunch(tmp_path / "q", watch, WAIT_READY, flags=("-q",))
        assert run.wait() == 0
        assert run.err == ""


def test_dry_run_help_version(tmp_path: Path) -> None:
    with no_leaks() as watch:
        (tmp_path / "x.py").write_text("print('must not run')")
        run = Run(tmp_path, watch, [*LAUNCH, "--devices=cpu:3", "--dry-run", "x.py", "a"])
        assert run.wait() == 0
        for text in (
            "cpu:0, cpu:1, cpu:2",
            "/dev/shm",
            "cgroup limit",
            "optimizer:",
            "worker-2: cpu:2",
            "x.py a",
        ):
            assert text in run.out
        assert "must not run" not in run.out
        run = Run(tmp_path, watch, [*LAUNCH, "--help"])
        assert run.wait() == 0
        assert run.out.startswith("usage: rplaunch")
        run = Run(tmp_path, watch, [*LAUNCH, "--version"])
        assert run.wait() == 0
        assert run.out == "rpruntime 0.1.0\n"


def test_user_files_with_our_names_do_no_harm(tmp_path: Path) -> None:
    """A launcher.py or session.py beside the script or in the working directory is the user's own."""
    for name in ("launcher", "session", "flags", "devices", "supervisor", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the user\\'s file')")
    (tmp_path / "scripts").mkdir()
    file = tmp_path / "scripts" / "train.py"
    file.write_text(WAIT_READY + "print('fine')")
    (tmp_path / "scripts" / "launcher.py").write_text("")
    with no_leaks() as watch:
        run = Run(tmp_path, watch, [sys.executable, str(ROOT / "launcher" / "__main__.py"), str(file)])
        assert run.wait() == 0, run.err
        run = Run(
            tmp_path,
            watch,
            [sys.executable, str(ROOT / "launcher" / "__main__.py"), "-q", "scripts/train.py"],
        )
        assert run.wait() == 0, run.err
        assert run.out == "fine\n"


def test_module_does_not_take_the_standard_library_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("secrets", "ctypes", "shutil", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the user\\'s file')")
    with no_leaks() as watch:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "train.py").write_text("print('fine')")
        run = Run(tmp_path, watch, [*LAUNCH, "--devices=inline", "sub/train.py"])
        assert run.wait() == 0, run.err
        assert run.out == "fine\n"


def test_debug_reaches_the_script(tmp_path: Path) -> None:
    script = "import os\nprint(os.environ.get('RPRUNTIME_DEBUG'))"
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, script, flags=("--debug", "-q", "--max-restarts=1"))
        assert run.wait() == 0
        assert run.out == "1\n"
        assert run.err == ""
        run = rplaunch(tmp_path / "2", watch, script)
        assert run.wait() == 0
        assert run.out == "None\n"


@pytest.mark.parametrize(
    "how, where",
    [
        ("rplaunch", "2>&-"),
        ("python", "2>/dev/full"),
        pytest.param("rplaunch", "2>/dev/full", marks=pytest.mark.slow),
        pytest.param("rplaunch", "2>&1 >/dev/null | true", marks=pytest.mark.slow),
        pytest.param("python", "2>&-", marks=pytest.mark.slow),
        pytest.param("python", "2>&1 >/dev/null | true", marks=pytest.mark.slow),
    ],
)
def test_stderr_that_cannot_be_written(tmp_path: Path, where: str, how: str) -> None:
    (tmp_path / "x.py").write_text(WAIT_READY + "open('done', 'w').write(str(len(session.devices)))\n")
    words = " ".join([sys.executable, *(["-m", "launcher"] if how == "rplaunch" else []), "x.py", where])
    with no_leaks() as watch:
        run = Run(tmp_path, watch, ["bash", "-o", "pipefail", "-c", words])
        assert run.wait() == 0, run.err
        assert (tmp_path / "done").read_text() == "2"


@pytest.mark.parametrize(
    "words, code",
    [
        ("--dry-run", 1),
        ("--nonsense", 2),
        *(pytest.param(words, 1, marks=pytest.mark.slow) for words in ("--help", "--version")),
    ],
)
def test_full_stdout(tmp_path: Path, words: str, code: int) -> None:
    with no_leaks() as watch:
        run = Run(tmp_path, watch, ["bash", "-c", f"exec {' '.join(LAUNCH)} {words} >/dev/full"])
        assert run.wait() == code
        assert len(run.err.splitlines()) == 1
        run = Run(tmp_path / "2", watch, ["bash", "-c", f"exec {' '.join(LAUNCH)} {words} >/dev/full 2>/dev/full"])
        assert run.wait() == code
