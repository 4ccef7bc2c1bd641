"""README and docs: code that runs, links that lead somewhere, flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rpruntime as rp
from launcher import rpctl
from rpruntime.flags import BY_KEY, FLAGS
from rpruntime.layout import lay_out
from rpruntime.loading import host_bytes

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCKS = {
    f"{page.name}-{number}": block
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.M | re.S))
}
OTHERS = {"--shm-size", "--memory", "--ulimit", "--all"}
"""Flags of docker and of scripts/test.sh."""


# --- code


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_compile(name: str) -> None:
    compile(BLOCKS[name], name, "exec")


def test_the_quick_start_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = BLOCKS["README.md-0"]
    assert "rp.RoundPipe(" in code
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    # A smaller model than the page's, everything else as it stands.
    small = code.replace("256", "16").replace("range(20)", "range(3)")
    names: dict[str, object] = {"__name__": "__main__"}
    session = rp.init(devices="inline", quiet=True)
    try:
        exec(compile(small, "quick start", "exec"), names)
    finally:
        session.close()
        torch.set_rng_state(state)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^loss \d\.\d{3}$", printed, flags=re.M)) == 3
    assert "EvalResult(loss=" in printed
    saved = torch.load(tmp_path / "model.pt")
    assert set(saved) == {"0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"}
    # Own memory, not a view of a whole segment.
    assert (tmp_path / "model.pt").stat().st_size < 100_000


def test_memory_table() -> None:
    rows = re.search(r"\| \*\*sum\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)\*\* \|", README)
    assert rows is not None
    for dtype, claimed in zip((torch.bfloat16, torch.float32), rows.groups(), strict=True):
        model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False))
        layout = lay_out(model, torch.optim.AdamW(model.parameters()), dtype, None)
        assert host_bytes(layout, states=2, asynchronous=False) == float(claimed) * 128 * 128


# --- links


def anchor(heading: str) -> str:
    """GitHub's name for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, part = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        if part:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.M)
            assert part in [anchor(heading) for heading in headings], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:rpruntime|launcher|tests|scripts|docs)/[\w/.]+?/?)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


# --- commands


def commands(program: str) -> list[str]:
    """Command lines of a program in the README's code, comments cut off."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S))
    return [line.split("#")[0].strip() for line in lines if line.split(" ")[0] == program]


def test_flags_of_rplaunch_exist() -> None:
    from rpruntime import flags

    lines = commands("rplaunch")
    assert len(lines) > 5
    for line in lines:
        flags.parse(line.split()[1:])


def test_every_flag_is_in_the_table_and_none_else() -> None:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    named = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", code)}
    known = {f"--{flag.name}" for flag in FLAGS} | {"--dry-run", "--version", "--help"}
    assert named - OTHERS - known == {"--logs"}
    table = {
        word for row in re.findall(r"^\| (`-.*?) \|", README, flags=re.M) for word in re.findall(r"--[a-z-]+", row)
    }
    assert table == known
    shorts = {f"-{flag.short}" for flag in FLAGS if flag.short}
    assert set(re.findall(r"^\| `(-\w)`", README, flags=re.M)) == shorts


def test_commands_of_rpctl_exist() -> None:
    usage = rpctl._USAGE
    lines = commands("rpctl")
    assert len(lines) > 5
    for line in lines:
        words = line.split()
        if len(words) == 1:
            continue
        described = re.search(rf"^  rpctl {words[1]}\b(.*)$", usage, flags=re.M)
        assert described is not None, line
        if words[1] in ("plan", "simulate"):
            continue  # they run below
        for flag in [word for word in words if word.startswith("--")]:
            assert flag in described[1], line


def test_planning_commands_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    lines = [words for line in commands("rpctl") if (words := line.split())[1:2] in (["plan"], ["simulate"])]
    complete = [words for words in lines if len(words) > 2]
    assert {words[1] for words in complete} == {"plan", "simulate"}
    for words in complete:
        assert rpctl.main(words[1:]) == 0, capsys.readouterr().err
        assert "roundpipe" in capsys.readouterr().out or words[1] == "plan"


def test_arguments_and_variables_exist() -> None:
    for variable in re.findall(r"RPRUNTIME_[A-Z_]+", README):
        assert variable in {flag.variable for flag in FLAGS}
    for arguments in re.findall(r"rp\.init\(([^)]*)\)", README):
        assert set(re.findall(r"(\w+)=", arguments)) <= set(BY_KEY)
