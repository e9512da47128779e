"""Catalog of models: configurations by preset name, folder, file or hub name, without weights."""

import difflib
import json
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from farspan.durable import parse_object
from farspan.formatting import some
from farspan.lazy import load
from farspan.spec import UnsupportedError

PRESETS = Path(__file__).parent / "models.json"
LARGEST_CONFIG = 2**24  # bytes
MOST_LAYERS = 10_000  # each takes milliseconds to build, even without weights
_WIDTHS = r"(hidden|intermediate|embedding)_size|(^|_)dim|n_embd|n_inner|d_model|d_ff"
# The ends of field names, and the largest number that each may have.
_MOST = {
    re.compile(r"layers?$"): MOST_LAYERS,
    re.compile(r"(experts?|heads?)$"): 2**14,
    re.compile(r"vocab_size$"): 2**24,
    re.compile(rf"({_WIDTHS})$"): 2**20,
}
CLOSE = 3  # most presets to suggest for a misspelt name
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)[^@]*")
_TUNED = re.compile(r"(instruct|base|chat|it|pt|hf)$")  # suffixes that keep the shapes
PATIENCE = 2.5  # seconds to wait for the hub's first answer


@dataclass(frozen=True, slots=True)
class Preset:
    """A model whose configuration ships with farspan, with the configuration's source."""

    name: str
    source: str
    hub: str | None  # name on the Hugging Face hub; None: known only from a paper
    aliases: tuple[str, ...]
    config: dict[str, Any]


def presets() -> tuple[Preset, ...]:
    return _presets()


def find_config(model: str) -> dict[str, Any]:
    """Return the config.json of a model by folder, preset, file or hub name.

    A hub name may have a revision: `Qwen/Qwen2.5-7B@main`. A folder of that name comes first, since
    it is the user's own. Only the configuration is read. Raises UnsupportedError if there is none.
    """
    if not model:
        raise UnsupportedError(
            f"model: expected a name, a folder or a file, got nothing; {_close(model)}"
        )
    place = Path(os.path.expanduser(model))
    if (place / "config.json").is_file():
        return read_config(place / "config.json")
    preset = _preset_called(model)
    if preset is not None:
        return deepcopy(preset.config)
    if place.is_file():
        return read_config(place)
    if place.is_dir():
        raise UnsupportedError(
            f"model: {model} has no config.json; expected a saved model's folder"
        )
    if model.startswith((".", "/", "~")):
        kind = "file" if place.suffix == ".json" else "folder"
        raise UnsupportedError(
            f"model: there is no {kind} {model}; give one that exists, a hub name such as "
            "Qwen/Qwen2.5-7B, or a preset"
        )
    address = _ADDRESS.fullmatch(model)
    name, revision = split_revision(address[4] if address else model)
    if _HUB_NAME.fullmatch(name) and place.suffix != ".json":
        return read_config(_from_hub(name, revision))
    raise UnsupportedError(
        f"model: {model!r} is no preset, folder or file, nor a hub name such as Qwen/Qwen2.5-7B; "
        f"{_close(model)}"
    )


def find_preset(model: str) -> Preset | None:
    """Return the preset that a name means; None if none does, or if a folder has that name."""
    if (Path(os.path.expanduser(model)) / "config.json").is_file():
        return None
    return _preset_called(model)


def _preset_called(model: str) -> Preset | None:
    """Return the preset of a name in any usual spelling: `Qwen3 8B`, `qwen3_8b`, its hub address.
    If the name has no owner, fine-tuned models count too, since their shapes are the same."""
    if model.startswith((".", "/", "~")):
        return None  # a path
    address = _ADDRESS.fullmatch(model)
    name = _plain(address[4] if address else model)
    return _named().get(name) or (None if "/" in model else _named().get(_TUNED.sub("", name)))


def refuse_unreachable(field: str, name: str) -> None:
    """Make the Hugging Face libraries use only the cache if the hub does not answer; they would
    retry for half a minute. Raises UnsupportedError if the model `name` is not in the cache."""
    constants = load("huggingface_hub", "constants")
    why = None if constants.HF_HUB_OFFLINE else _unreachable()
    if why is None:
        return
    stems = [f"{kind}--{name.replace('/', '--')}" for kind in ("models", "datasets")]
    if any((Path(constants.HF_HUB_CACHE) / stem).exists() for stem in stems):
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
        warnings.warn(
            f"{field}: the Hugging Face hub cannot be reached ({why}); using the cached copy of "
            f"{name}",
            stacklevel=2,
        )
    else:
        close = _close(name)
        raise UnsupportedError(
            f"{field}: {name!r} is not on this machine, and the Hugging Face hub cannot be reached "
            f"({why}); connect to the network, or give a local folder or file"
            + (f" ({close})" if close.startswith("did") else "")
        )


@cache
def _unreachable() -> str | None:
    """Return why the hub cannot be reached, or None if it answers within seconds."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE)
    answers: list[str | None] = []

    def ask() -> None:
        try:
            asked = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.urlopen(asked, timeout=patience).close()
        except (urllib.error.HTTPError, ssl.SSLError):
            pass  # the hub answers
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):
                words = getattr(error.reason, "strerror", None) or error.reason
                answers.append(" ".join(str(words).split()))
        except (OSError, ValueError) as error:
            answers.append(getattr(error, "strerror", None) or str(error))
        answers.append(None)

    asking = threading.Thread(target=ask, daemon=True)  # DNS look-up has no time limit
    asking.start()
    asking.join(patience)
    return answers[0] if answers else f"{endpoint} has not answered for {patience:g} s"


def refuse_absent(field: str, name: str) -> None:
    """Raise UnsupportedError for a path that is neither local nor on the hub. The library would
    retry silently for most of a minute."""
    if is_on_hub(name):
        refuse_unreachable(field, name)
    elif not _HUB_NAME.fullmatch(name) and not Path(name).expanduser().exists():
        raise UnsupportedError(
            f"{field}: no folder {name} here; give one that exists, or a hub name such as "
            "Qwen/Qwen2.5-7B"
        )


def hub_name(field: str, name: str) -> str:
    """Return a preset's name on the hub; any other name, and that of a local folder, is returned
    unchanged. Raises UnsupportedError for a preset without published weights."""
    preset = None if Path(name).expanduser().exists() else _named().get(_plain(name))
    if preset is None:
        return name
    if preset.hub is None:
        raise UnsupportedError(
            f"{field}: the preset {preset.name} describes a model of a paper, without weights on "
            "the hub; give a folder or a hub name, or model.config for random weights"
        )
    return preset.hub


def split_revision(model: str) -> tuple[str, str | None]:
    """Split `name@revision` into name and revision, which is None if missing or for a folder."""
    name, _, revision = model.partition("@")
    on_hub = revision and _HUB_NAME.fullmatch(name) and not Path(model).expanduser().exists()
    return (name, revision) if on_hub else (model, None)


def with_revision(path: str, revision: str | None) -> str:
    """Join a hub name and a revision as `find_config` takes them; folders have no revision."""
    return path if revision is None or Path(path).expanduser().exists() else f"{path}@{revision}"


def pinned(revision: str | None) -> dict[str, str]:
    """Return the arguments of `from_pretrained` that pin a revision. A model's code in another
    repository must have the same revision, or it is not found."""
    return {} if revision is None else {"revision": revision, "code_revision": revision}


def is_on_hub(path: str) -> bool:
    """Return whether a path is a name on the hub and not a local folder."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).expanduser().exists()


def _from_hub(model: str, revision: str | None) -> Path:
    where = model, "config.json"
    try:
        # A copy in the cache needs no network; without one the library tries for half a minute.
        cached = load("huggingface_hub", "try_to_load_from_cache")(*where, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        refuse_unreachable("model", model)
        return Path(load("huggingface_hub", "hf_hub_download")(*where, revision=revision))
    except UnsupportedError:
        raise
    except ImportError as error:
        raise UnsupportedError(
            f"model: {model} is not a preset, and reading the hub needs huggingface_hub ({error}); "
            f"pip install farspan, which has it, or name a preset; {_close(model)}"
        ) from error
    except Exception as error:  # missing, gated, no network: each its own type
        raise UnsupportedError(
            f"model: no config.json of {with_revision(model, revision)!r} could be read from the "
            f"Hugging Face hub ({' '.join(str(error).split())}); give a folder that has one, or "
            f"a preset: {_close(model)}"
        ) from error


def read_config(path: Path, field: str = "model") -> dict[str, Any]:
    """Return the configuration in a JSON file. Raises UnsupportedError, naming the run file's
    field, if the file cannot be read or has sizes that no model has."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_CONFIG + 1)
        config = {} if len(data) > LARGEST_CONFIG else parse_object(data, False)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        raise UnsupportedError(
            f"{field}: {path} is not a JSON file that can be read: {words}; give a "
            "model's folder, or its config.json"
        ) from error
    if len(data) > LARGEST_CONFIG:
        raise UnsupportedError(
            f"{field}: {path} has more than {LARGEST_CONFIG >> 20} MiB, more than any model's "
            "config.json; give a model's folder, or its config.json"
        )
    refuse_huge(config, f"{field}: {path}: ")
    return config


def refuse_huge(fields: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError for a configuration with sizes that no model has, since building such
    a model would not end, even without weights. The message begins with `where`."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            refuse_huge(value, f"{where}{name}.")
        elif isinstance(value, int):
            most = min((most for ends, most in _MOST.items() if ends.search(name)), default=value)
            if value > most:
                raise UnsupportedError(
                    f"{where}{name}: expected at most {most:,}, more than any model has, got "
                    f"{value:,}; correct it"
                )


def _close(model: str) -> str:
    names = {preset.name.lower(): preset.name for preset in presets()}
    near = difflib.get_close_matches(model.lower().split("/")[-1], names, CLOSE, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(names[name] for name in near)}?"
    return f"presets: {some(list(names.values()))}"


@cache
def _presets() -> tuple[Preset, ...]:
    values = json.loads(PRESETS.read_text(encoding="utf-8"))
    return tuple(
        Preset(name, entry["source"], entry["hub"], tuple(entry["aliases"]), entry["config"])
        for name, entry in values.items()
    )


@cache
def _named() -> dict[str, Preset]:
    """Return the presets by each of their names, reduced to letters and digits."""
    return {
        _plain(name): preset
        for preset in presets()
        for name in (preset.name, *preset.aliases, preset.hub)
        if name
    }


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
