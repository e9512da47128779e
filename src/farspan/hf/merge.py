"""Merge adapters and their base model into one model's folder: `farspan merge`.

LoRA is added in the files of the weights: each file is copied, and every weight that has an adapter
is overwritten in the copy, in place, one at a time. Adapters of other kinds (DoRA, modules that are
trained whole) are merged by peft, with the whole model in memory.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from farspan.durable import (
    PARTIAL,
    expect_json,
    given_json,
    publish,
    read_json,
    refuse_links,
    refuse_pipes,
    write_bytes,
    writing,
)
from farspan.hf.load import MISSING, load_config, load_model
from farspan.lazy import load
from farspan.profile.catalog import is_on_hub, refuse_absent
from farspan.spec import UnsupportedError

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"  # in ADAPTER_CONFIG: the base model of the adapters
SOURCE = "farspan.json"  # of a run: how its model was trained, its overrides ...
LARGEST = 1e30  # of lora_alpha: larger ones overflow fp32
FILES = "files"  # ... and the digests of its files
INDEX_FOLDER = "index"  # next to them: the index of sparse attention
PREFIX = "base_model.model."  # before the model's own name in a name of peft's
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".index.json")
# Fields of an adapter_config.json that may have any value: W still gets lora_alpha / r * B(A).
# With another value in any other field peft merges.
EITHER = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "r", "lora_alpha", "lora_dropout", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    )
)


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge: the model's folder, the number of modules merged, and the method."""

    folder: Path
    modules: int  # with adapters
    streamed: bool  # one weight at a time; else in memory, by peft

    def describe(self) -> str:
        how = "" if self.streamed else ", by peft in memory"
        return f"adapters of {self.modules} modules merged{how}; the model is in {self.folder}"


def merge(source: Path, folder: Path, base: str | None = None) -> Merged:
    """Merge the adapters of `source` with their base model, and write the model and its tokenizer
    to `folder`, in the base's dtypes.

    Args:
        source: A run's folder, or one that peft wrote.
        folder: It appears whole or not at all.
        base: Replaces the model that the adapters name.

    Raises:
        UnsupportedError: The adapters or their base cannot be merged, or `folder` exists.
        WriteFailed: The disk refuses the files.
    """
    adapters = _adapters_in(source)
    if os.path.lexists(folder):
        raise UnsupportedError(f"output: {folder} exists already; name a new folder")
    _refuse_links(adapters)
    config = expect_json(adapters / ADAPTER_CONFIG)
    told = given_json(adapters / SOURCE, overrides=dict)
    overrides = told.pop("overrides", {})
    told.pop(FILES, None)
    model = _base_folder(config, base, adapters)
    if base is None:  # others' adapters may name any folder
        _refuse_links(model)
    partial = folder.with_name(f"{PARTIAL}{folder.name}")
    with open_tensors(adapters / ADAPTER_TENSORS) as tensors:
        names = list(tensors.keys())
        _refuse_damaged(adapters, config, tensors)
        files = _weight_files(model)
        plain = _is_plain(config) and _fit(names, files)
        with writing(partial, SafetensorError):
            _copy_others(model, partial)
            if plain:
                _add(tensors, config["lora_alpha"] / config["r"], model, files, partial)
                if overrides:
                    made = load_config(path=str(model), config=None, overrides=overrides)
                    made.save_pretrained(partial)
            else:
                _merge_in_memory(model, adapters, overrides, partial)
            _copy_others(adapters, partial, ADAPTER_CONFIG, SOURCE, "README.md")
            if (adapters / INDEX_FOLDER).is_dir():
                shutil.copytree(adapters / INDEX_FOLDER, partial / INDEX_FOLDER)
            write_bytes(partial / SOURCE, json.dumps({**told, "merged": True}).encode("utf-8"))
    publish(partial, folder)
    modules = {name.partition(".lora_")[0] for name in names}
    return Merged(folder, len(modules), plain)


def _refuse_links(folder: Path) -> None:
    """Raise UnsupportedError if a link leads out of a folder. In the hub's cache, a snapshot may
    link to files in its repository's folder `blobs`."""
    cached = folder.parent.name == "snapshots"
    refuse_links(folder, *[folder.resolve().parents[1] / "blobs"] * cached)


def _adapters_in(source: Path) -> Path:
    """Return the folder with adapters inside a run's folder, or `source` itself."""
    if (source / "model").is_symlink():
        refuse_links(source)
    for folder in (source / "model", source):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
        if (folder / "config.json").is_file():
            raise UnsupportedError(f"{folder}: holds a whole model; there are no adapters to merge")
    if (source / "config.yaml").is_file():
        raise UnsupportedError(
            f"{source}: this run has not exported its adapters yet; resume it with farspan train "
            "until it ends"
        )
    raise UnsupportedError(
        f"{source}: holds no adapters; give a run's folder, or one with {ADAPTER_CONFIG}"
    )


def _refuse_damaged(adapters: Path, config: Mapping[str, Any], tensors: Any) -> None:
    """Raise UnsupportedError for tensors that are not finite, or for LoRA whose rank or alpha does
    not fit its tensors."""
    file, where = adapters / ADAPTER_TENSORS, adapters / ADAPTER_CONFIG
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise UnsupportedError(f"{where}: peft_type: expected a name such as LORA, got {kind!r}")
    rank, _ = rank_and_alpha(where, config) if kind == "LORA" else (0, 0)
    names = list(tensors.keys())
    if not names:
        raise UnsupportedError(
            f"{file}: holds no tensors; take the adapters of an earlier checkpoint"
        )
    for name in names:
        tensor = tensors.get_tensor(name)
        if ".lora_" in name and not (tensor.is_floating_point() and tensor.itemsize > 1):
            raise UnsupportedError(
                f"{file}: {name} is {tensor.dtype}; expected float64, float32, bfloat16 or float16"
            )
        if not bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all()):
            raise UnsupportedError(
                f"{file}: {name} has values that are not finite (NaN or infinity); take the "
                "adapters of an earlier checkpoint"
            )
        own = {"lora_A.weight": 0, "lora_B.weight": 1}.get(".".join(name.split(".")[-2:]))
        ranked = kind == "LORA" and own is not None and not config.get("rank_pattern")
        if ranked and (tensor.ndim < 2 or tensor.shape[own] != rank):
            raise UnsupportedError(
                f"{file}: {name} of shape {list(tensor.shape)} does not fit rank {rank}; set r and "
                f"lora_alpha in {ADAPTER_CONFIG} to what the adapters were trained with"
            )


def rank_and_alpha(where: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return the rank and alpha of LoRA adapters. Raises UnsupportedError, naming the field."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UnsupportedError(f"{where}: r: expected a whole number above 0, got {rank!r:.80}")
    if type(alpha) not in (int, float) or not abs(alpha) < LARGEST:  # type: ignore[arg-type]
        raise UnsupportedError(f"{where}: lora_alpha: expected a number, got {alpha!r:.80}")
    return rank, float(alpha)  # type: ignore[arg-type]


def _base_folder(config: Mapping[str, Any], base: str | None, adapters: Path) -> Path:
    """Return the folder of the base model that adapters belong to."""
    name = base or config.get(BASE)
    if not isinstance(name, str) or not name:
        raise UnsupportedError(
            f"{adapters / ADAPTER_CONFIG}: does not name a base model; give it as --base"
        )
    refuse_absent("base", name)
    if not is_on_hub(name):
        return Path(name).expanduser()
    revision = config.get("revision") if base is None else None
    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=kinds))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"base: {name!r} is neither a folder nor a hub name that can be reached: {error}"
        ) from error


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises UnsupportedError if it is damaged or cannot be read."""
    try:
        refuse_pipes(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UnsupportedError(f"{path}: cannot be read as safetensors: {error}") from error


def _weight_files(model: Path) -> dict[str, Path]:
    """Return each weight's safetensors file, as transformers finds it; empty if there is none."""
    if (model / WEIGHTS).is_file():
        files = {WEIGHTS}
    else:
        listed = (read_json(model / INDEX, finite=False) or {}).get("weight_map", {})
        files = {*listed.values()} if isinstance(listed, dict) else {""}
        if any(not isinstance(n, str) or not n or {"..", "/"} & {*Path(n).parts} for n in files):
            raise UnsupportedError(
                f"{model / INDEX}: weight_map: expected a file in this folder for each weight"
            )
    found: dict[str, Path] = {}
    for name in sorted(files):
        with open_tensors(model / name) as file:
            found |= dict.fromkeys(file.keys(), model / name)
    return found


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Return whether every adapter just adds lora_alpha / r * B(A) to a weight."""
    try:
        usual = load("peft", "LoraConfig")().to_dict()
    except ImportError as error:
        raise UnsupportedError(MISSING.format(error=error)) from error
    if config.get("peft_type") != "LORA" or config.get("init_lora_weights") not in (True, False):
        return False
    known = EITHER | {"init_lora_weights"}
    return all(v is None or usual.get(k) == v for k, v in config.items() if k not in known)


def _fit(names: Iterable[str], files: Mapping[str, Path]) -> bool:
    """Return whether every adapter's A and B fit a weight of the same name in these files. Models
    whose weights transformers renames at loading have other names."""
    a = {n.removesuffix(".lora_A.weight") for n in names if n.endswith(".lora_A.weight")}
    b = {n.removesuffix(".lora_B.weight") for n in names if n.endswith(".lora_B.weight")}
    return a == b and 2 * len(a) == len(list(names)) and all(_weight_of(m) in files for m in a)


def _weight_of(module: str) -> str:
    return f"{module.removeprefix(PREFIX)}.weight"


def _copy_others(source: Path, target: Path, *without: str) -> None:
    for path in source.iterdir():
        if path.is_file() and path.name not in without and not path.name.endswith(SUFFIXES):
            shutil.copyfile(path, target / path.name)


def _add(tensors: Any, scale: float, model: Path, files: Mapping[str, Path], target: Path) -> None:
    """Copy weight files, and in the copies add scale * B(A) to the weights that have adapters."""
    for path in sorted(set(files.values())):
        copy = target / path.relative_to(model)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
        with open_tensors(path) as old, copy.open("r+b") as new:
            for name in tensors.keys():  # noqa: SIM118
                module, _, kind = name.rpartition(".lora_")
                if kind == "A.weight" and _weight_of(module) in header:
                    weight = _weight_of(module)
                    b = tensors.get_tensor(f"{module}.lora_B.weight")
                    merged = _sum(
                        weight, old.get_tensor(weight), tensors.get_tensor(name), b, scale
                    )
                    new.seek(start + header[weight]["data_offsets"][0])
                    new.write(merged.contiguous().view(torch.uint8).numpy().data)
    if not (model / WEIGHTS).is_file():
        shutil.copyfile(model / INDEX, target / INDEX)


def _sum(name: str, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W [outer, inner] + scale * B [outer, rank] A [rank, inner], in W's dtype."""
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise UnsupportedError(
            f"base: {name} is quantised ({weight.dtype}); give the unquantised model as --base"
        )
    if a.ndim != 2 or b.ndim != 2 or weight.shape != (b.shape[0], a.shape[1]):
        raise UnsupportedError(
            f"base: {name} is {list(weight.shape)}, but its adapters A {list(a.shape)} and B "
            f"{list(b.shape)} fit another model; give that model as --base"
        )
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    merged = weight.to(wide).addmm(b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)
    if not bool(merged.isfinite().all()):
        raise UnsupportedError(
            f"base: {name} with its adapters has values that are not finite; check the base, and "
            f"lora_alpha and r in {ADAPTER_CONFIG}"
        )
    return merged


def _merge_in_memory(model: Path, adapters: Path, overrides: dict[str, Any], target: Path) -> None:
    """Merge adapters into their base model in memory, by peft, in the base's dtype."""
    made = load_config(path=str(model), config=None, overrides=overrides)
    if getattr(made, "quantization_config", None) is not None:
        raise UnsupportedError(f"base: {model} is quantised; give the unquantised model as --base")
    dtype = getattr(made, "dtype", None) or torch.float32
    whole: Any = load_model(path=str(model), overrides=overrides, dtype=dtype)
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if tied:  # else peft adds adapters of one to both, and those of both twice
        head.weight = nn.Parameter(head.weight.detach().clone())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
            peft_model = load("peft", "PeftModel").from_pretrained(
                whole, str(adapters), autocast_adapter_dtype=False
            )
        _refuse_other_tensors(peft_model, adapters)
        merged = peft_model.merge_and_unload(safe_merge=True)
    except UnsupportedError:
        raise
    except Exception as error:  # each of its tuners has its own errors
        raise UnsupportedError(
            f"{adapters}: peft cannot merge them into {model}: {' '.join(str(error).split())}"
        ) from error
    if tied:
        _tie(merged, peft_model.peft_config)
    merged.save_pretrained(target)


def _refuse_other_tensors(peft_model: Any, adapters: Path) -> None:
    """Raise UnsupportedError if an adapters' file lacks tensors that its configuration requires, or
    has tensors that peft would not load."""
    wanted = load("peft", "get_peft_model_state_dict")(peft_model, save_embedding_layers=False)
    with open_tensors(adapters / ADAPTER_TENSORS) as tensors:
        names = {name for name in tensors.keys() if ".base_layer." not in name}  # noqa: SIM118
    lost = names - wanted.keys() - peft_model.state_dict().keys()
    for name in sorted(wanted.keys() - names | lost):
        what = "has no place in the model that" if name in lost else "is missing, which"
        raise UnsupportedError(
            f"{adapters / ADAPTER_TENSORS}: {name} {what} {ADAPTER_CONFIG} describes; give the "
            "configuration that the adapters were trained with, or their model as --base"
        )


def _tie(merged: Any, configs: Mapping[str, Any]) -> None:
    """Tie head and embedding again, or remove the tie if adapters changed the two differently."""
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    declared = any(getattr(one, "ensure_weight_tying", False) for one in configs.values())
    alike = declared or torch.equal(head.weight, embedding.weight)
    if alike:
        head.weight = embedding.weight
    for config in (merged.config, merged.config.get_text_config()):
        config.tie_word_embeddings = alike  # peft 0.21 clears it
