"""Wrong folders for `rp.from_pretrained`: one sentence with the cause and the remedy, before anything is started."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import rpruntime as rp
from rpruntime import ConfigError
from rpruntime.models import pretrained
from rpruntime.models.folders import check_model_folder
from tests.reference import PausedSession
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers.utils.logging.disable_progress_bar()
    folder: Path = tmp_path_factory.mktemp("good")
    tiny("llama").save_pretrained(folder)
    return folder


def with_config(good: Path, folder: Path, **changes: Any) -> None:
    shutil.copytree(good, folder, dirs_exist_ok=True)
    config = json.loads((good / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def adapters(good: Path, folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "base/model"}')


def checkpoints(good: Path, folder: Path) -> None:
    (folder / "step-3").mkdir()
    (folder / "step-3" / "checkpoint.json").touch()


WRONG: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "empty": (lambda good, folder: None, r"has no config\.json \(it is empty\)"),
    "only weights": (
        lambda good, folder: shutil.copy(good / "model.safetensors", folder),
        r"has no config\.json \(only model\.safetensors\)",
    ),
    "one too high": (lambda good, folder: shutil.copytree(good, folder / "inner"), "but inner in it has: give that"),
    "adapters": (adapters, r"holds adapters of peft.*rp\.from_pretrained\('base/model'\).*is_trainable=True"),
    "checkpoints": (checkpoints, r"holds checkpoints of rpruntime.*pipe\.load_checkpoint"),
    "no weights": (lambda good, folder: shutil.copy(good / "config.json", folder), "a configuration but no weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_folders_that_are_no_model(good: Path, tmp_path: Path, case: str) -> None:
    make, message = WRONG[case]
    make(good, tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        rp.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_lead_nowhere(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./none", "/none", "a/b/c", "", Path("none"), "~/none"):
        with pytest.raises(ConfigError, match=rf"there is no folder {str(name)!r} \(in {tmp_path}\)") as caught:
            rp.from_pretrained(name)
        assert ("expanduser" in str(caught.value)) == (name == "~/none")
    with pytest.raises(ConfigError, match=r"config\.json is a file: give the folder"):
        rp.from_pretrained(str(good / "config.json"))
    for name in ("gpt2", "owner/model"):
        check_model_folder(name)  # the hub's


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise OSError("No such repository.\nMuch more about it")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", not_there)
    with pytest.raises(ConfigError, match=r"no folder 'owner/model' \(in .*name on the hub.*No such repository\.$"):
        rp.from_pretrained("owner/model")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{not json", "cannot load .*not a valid JSON file"),
        ("[]", "cannot load|has no model_type"),
        ("{}", r"config\.json of .* has no model_type"),
        ('{"model_type": "llamma"}', "is a 'llamma', which transformers .* does not know"),
    ],
)
def test_configurations(good: Path, tmp_path: Path, text: str, message: str) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        rp.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_only_loading_shows(good: Path, tmp_path: Path, session: PausedSession) -> None:
    with_config(good, tmp_path / "t5", model_type="t5", d_model=8)
    with pytest.raises(ConfigError, match="is a t5, which is no causal LM") as caught:
        rp.from_pretrained(tmp_path / "t5", session=session)
    assert len(str(caught.value)) < 300
    with_config(good, tmp_path / "wide", hidden_size=64, head_dim=16)
    with pytest.raises(ConfigError, match=r"other shapes than its config\.json says"):
        rp.from_pretrained(tmp_path / "wide", session=session)
    shutil.copytree(good, tmp_path / "index")
    os.rename(tmp_path / "index" / "model.safetensors", tmp_path / "index" / "other.safetensors")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json is no index of safetensors files"):
        rp.from_pretrained(tmp_path / "index", session=session)


def test_weights_that_are_not_there_are_warned_about(good: Path, tmp_path: Path, session: PausedSession) -> None:
    with_config(good, tmp_path, num_hidden_layers=4)
    with pytest.warns(UserWarning, match=r"no weights for model\.layers\.3\..* and \d+ more: .*random") as caught:
        rp.from_pretrained(tmp_path, session=session)
    assert caught[0].filename == __file__


def test_subfolders_are_refused(good: Path) -> None:
    with pytest.raises(ConfigError, match="path of that folder itself"):
        rp.from_pretrained(good.parent, subfolder=good.name)


@pytest.mark.parametrize(
    "error, message",
    [
        (
            ModuleNotFoundError("No module named 'absent'", name="absent"),
            r"needs absent: pip install 'rpruntime\[hf\]'",
        ),
        (ModuleNotFoundError("No module named 'other'", name="other"), "absent is installed, but lacks other"),
        (ImportError("other>=3 is required"), "absent is installed, but cannot be imported: other>=3 is required"),
    ],
)
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, error: ImportError, message: str) -> None:
    imported = builtins.__import__

    def fails(name: str, *rest: Any) -> Any:
        if name == "absent":
            raise error
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(ConfigError, match=message):
        pretrained.require("absent")
