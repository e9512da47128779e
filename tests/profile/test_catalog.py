"""A model is found by preset, folder, file or hub name, and a slip of the pen is answered."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from farspan.profile.catalog import (
    LARGEST_CONFIG,
    find_config,
    find_preset,
    presets,
    split_revision,
)
from farspan.profile.store import find_profiles
from farspan.spec import UnsupportedError
from tests.data.characters import character_tokenizer
from tests.planner.configurations import config_of
from tests.profiles import spec_of

TINY = config_of("qwen3")

# The elements that the published safetensors files hold, by their own headers.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B": 7_241_732_096,
    "Mistral-Small-24B": 23_572_403_200,
    "GPT-OSS-20B": 20_914_757_184,
    "GPT-OSS-120B": 116_829_156_672,
    "GPT-2": 124_439_808,
    # Gemma 3's files hold eyes, too: 416,866,032 elements of the vision tower and (hidden + 1) *
    # 1,152 that join it to the text, taken off here; DeepSeek's hold a layer more, which predicts a
    # second token and which transformers leaves out.
    "Gemma-3-4B": 4_300_079_472 - 416_866_032 - 2561 * 1152,
    "Gemma-3-12B": 12_187_325_040 - 416_866_032 - 3841 * 1152,
    "Gemma-3-27B": 27_432_406_640 - 416_866_032 - 5377 * 1152,
    "DeepSeek-V3": 671_026_404_352,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no\n  network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", nothing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)


def save(folder: Path, config: object = TINY) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name: str) -> None:
    assert spec_of(name).parameters == PUBLISHED[name]


def test_every_preset_says_where_it_is_from_and_goes_by_its_own_names() -> None:
    owned = [{name.lower() for name in _names(preset)} for preset in presets()]
    assert len(set.union(*owned)) == sum(map(len, owned))
    for preset in presets():
        assert preset.source.startswith(("https://huggingface.co/", "MEMO (arXiv", "FPDT (arXiv"))
        for name in _names(preset):
            assert find_config(name.swapcase()) == preset.config


def _names(preset: Any) -> list[str]:
    return [preset.name, *preset.aliases, *([preset.hub] if preset.hub else [])]


def test_a_preset_cannot_be_changed_through_what_was_found() -> None:
    find_config("gpt-oss-20b")["rope_scaling"]["factor"] = 1.0
    find_config("gpt-oss-20b").clear()
    assert find_config("gpt-oss-20b")["rope_scaling"]["factor"] == 32.0


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "mine")
    (tmp_path / "other.json").write_text(json.dumps(TINY))
    for place in (folder, folder / "config.json", tmp_path / "other.json"):
        assert find_config(str(place)) == TINY
        assert find_profiles(str(place)).name == str(place)
    monkeypatch.chdir(tmp_path)
    assert find_config("mine") == TINY
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_config("~/mine") == TINY


def test_a_folder_in_sight_comes_before_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    assert find_config("Qwen3-8B")["hidden_size"] == 4096
    save(tmp_path / "gpt-7b")
    assert find_config("gpt-7b") == TINY
    assert find_preset("gpt-7b") is None


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / "far" / "config.json")

    def cached(name: str, file: str, revision: str | None) -> object:  # noqa: ARG001
        # The library gives an object of its own where it knows that there is no such file.
        return str(tmp_path / "near" / file) if name == "some/near" else object()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    save(tmp_path / "far")
    save(tmp_path / "near", {**TINY, "vocab_size": 7})
    assert find_config("some/far.model-2") == TINY
    assert find_config("some/near")["vocab_size"] == 7
    assert asked == [("some/far.model-2", "config.json", None)]
    assert find_profiles("Qwen/Qwen2.5-7B").name == "Qwen2.5-7B"
    assert len(asked) == 1
    # The preset is of no revision.
    for name in ("some/far.model-2", "Qwen/Qwen2.5-7B"):
        assert find_config(f"{name}@0a1b") == TINY
        assert asked[-1] == (name, "config.json", "0a1b")


def test_a_folder_may_have_a_name_as_of_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny@3").mkdir(parents=True)
    assert split_revision("runs/tiny@3") == ("runs/tiny@3", None)
    assert split_revision("runs/tiny@4") == ("runs/tiny", "4")


@pytest.mark.parametrize(
    ("path", "kind"), [("./nosuch", "folder"), ("/no/such", "folder"), ("../config.json", "file")]
)
def test_a_path_that_is_missing_is_said_to_be(path: str, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^model: there is no {kind} {path}; give"):
        find_config(path)


def test_weights_in_place_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(UnsupportedError, match=r"give a model's folder, or its config\.json$"):
        find_config(str(path))
    with path.open("wb") as file:
        file.truncate(LARGEST_CONFIG + 1)
    with pytest.raises(
        UnsupportedError, match=r"MiB, more than any model's config\.json; give a model's folder"
    ):
        find_config(str(path))


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("qwen2.5-7", "did you mean Qwen2.5-7B"),
        ("llama4-8b", "did you mean Llama-3-8B"),
        ("GPT-30", "did you mean .*GPT-30B-MEMO or GPT-30B-FPDT"),
        ("zzzz", r"presets: Qwen2.5-0.5B, .* and \d+ more \(farspan plan --help\)"),
        ("a/b/c", "presets: "),
    ],
)
def test_slips_of_the_pen(name: str, close: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^model: '{name}' is no preset, folder or file.*{close}"
    ):
        find_config(name)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen3 8B", "Qwen3-8B"),
        ("qwen3:8b", "Qwen3-8B"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen3-8B"),
        ("hf.co/Qwen/Qwen3-8B/tree/main", "Qwen3-8B"),
        ("llama3-8b", "Llama-3-8B"),
        ("Llama 3.1 8B Instruct", "Llama-3.1-8B"),
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
    ],
)
def test_usual_writings(name: str, preset: str) -> None:
    found = find_preset(name)
    assert found is not None
    assert found.name == preset
    assert find_config(name) == found.config


def test_no_two_presets_are_called_the_same() -> None:
    names = [n for p in presets() for n in {p.name, *p.aliases, *filter(None, [p.hub])}]
    assert len({"".join(filter(str.isalnum, n.lower())) for n in names}) >= len(presets())
    assert all(find_preset(preset.name) == preset for preset in presets())
    assert find_preset("../Qwen3-8B") is None


UNREACHABLE = """
import sys, time
from farspan.profile.catalog import find_config, refuse_absent
from farspan.spec import UnsupportedError
for ask in (lambda: find_config("some/model"), lambda: refuse_absent("data.tokenizer", "a/b")):
    began = time.perf_counter()
    try:
        ask()
    except UnsupportedError as error:
        print(time.perf_counter() - began, str(error).count("\\n"), error)
"""


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_is_away_is_told_within_seconds(answers: bool, tmp_path: Path) -> None:
    """Nothing listens, or what listens never answers."""
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if answers:
            hub.listen()
        place = f"http://127.0.0.1:{hub.getsockname()[1]}"
        of = {**os.environ, "HF_ENDPOINT": place, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        found = subprocess.run(
            [sys.executable, "-c", UNREACHABLE], env=of, capture_output=True, text=True, check=True
        )
    assert found.stderr == ""
    model, tokenizer = found.stdout.splitlines()
    away = "is not on this machine, and the Hugging Face hub cannot be reached"
    assert f"0 model: 'some/model' {away}" in model
    assert "data.tokenizer: 'a/b' is not on this machine" in tokenizer
    assert float(model.split()[0]) < 4.0  # 2.5 of patience, and a busy machine
    assert float(tokenizer.split()[0]) < 0.5  # asked once


CACHED = """
import sys, time
from farspan.data.tokenizers import load_tokenizer
from farspan.profile.catalog import find_config, refuse_absent
began = time.perf_counter()
refuse_absent("model.path", "some/model")
from transformers import AutoConfig
print(AutoConfig.from_pretrained("some/model").model_type, find_config("some/model")["model_type"])
refuse_absent("data.tokenizer", "some/model")
load_tokenizer("some/model", False, None)
"""


def test_a_model_in_the_cache_asks_an_absent_hub_once(tmp_path: Path) -> None:
    """What listens hangs up; the library would try each file again, five times."""
    commit, stem = "0" * 40, tmp_path / "hub" / "models--some--model"
    (stem / "refs").mkdir(parents=True)
    (stem / "refs/main").write_text(commit)
    folder = stem / "snapshots" / commit
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        attempts: list[None] = []

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    hub.accept()[0].close()
                    attempts.append(None)

        threading.Thread(target=hang_up, daemon=True).start()
        place = f"http://127.0.0.1:{hub.getsockname()[1]}"
        of = {**os.environ, "HF_ENDPOINT": place, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        found = subprocess.run(
            [sys.executable, "-c", CACHED], env=of, capture_output=True, text=True, check=False
        )
        hub.shutdown(socket.SHUT_RDWR)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == found.stdout.split()[1]
    assert len(attempts) == 1
    told = "the Hugging Face hub cannot be reached"
    assert found.stderr.count(told) == 1
    assert "using the cached copy of some/model" in found.stderr


def test_no_name_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save(tmp_path / "here"))
    with pytest.raises(
        UnsupportedError, match=r"^model: expected a name, .*got nothing; presets: Qwen"
    ):
        find_config("")
    assert find_config(".") == TINY


def test_files_that_hold_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match=r"^model: .*empty has no config\.json"):
        find_config(str(tmp_path / "empty"))
    for content, message in (
        (b"{", "is not a JSON file that can be read"),
        (b"\xff", "is not a JSON file that can be read"),
        (b"[1]", "expected a JSON object"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UnsupportedError, match=f"^model: .*{message}"):
            find_config(str(tmp_path))
