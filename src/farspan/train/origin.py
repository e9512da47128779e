"""Start of a run from the weights of another run or from adapters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from farspan.checkpoint.format import (
    copy_saved,
    refuse_other_model,
)
from farspan.checkpoint.saver import (
    FROZEN,
    RNG,
    entries_of,
    list_checkpoints,
    manifest_path,
    model_tensors,
    open_checkpoint,
)
from farspan.distributed.run_context import DistributedContext
from farspan.durable import expect_json, given_json
from farspan.hf.merge import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BASE,
    SOURCE,
    open_tensors,
    rank_and_alpha,
)
from farspan.hf.quantized import WHOLE, frozen_digest
from farspan.spec import UnsupportedError
from farspan.train.config import LoraConfig, ModelConfig, RunConfig, StartConfig
from farspan.train.yaml_config import build, read_file

T = TypeVar("T")

ELSEWHERE = (
    "name another run or checkpoint, or set model and optimizer.states in the run file to those "
    "that this one was trained with"
)
# Keys of adapter_config.json that make adapters compute more than W x + alpha / r * B(A(x)).
OTHER_KINDS = (
    *("use_dora", "use_rslora", "use_qalora", "modules_to_save", "trainable_token_indices"),
    *("rank_pattern", "alpha_pattern", "lora_bias", "layer_replication"),
)


def is_adapters(path: Path) -> bool:
    """Return whether a folder holds adapters, that is, peft's configuration file."""
    return (path / ADAPTER_CONFIG).is_file()


def with_base(model: ModelConfig) -> tuple[ModelConfig, str | None]:
    """Find the base model of adapters. If `model.path` is a folder of adapters, return their base
    model, configured with such adapters, and the folder; otherwise `model` and None. Raises
    UnsupportedError naming the field, also for quantised weights without adapters."""
    path = None if model.path is None else Path(model.path).expanduser()
    if path is None or not is_adapters(path):
        if model.quantize is not None and model.lora is None:
            raise UnsupportedError(WHOLE.format(instead="leave model.quantize out"))
        return model, None
    config = expect_json(path / ADAPTER_CONFIG)
    base, revision = config.get(BASE), config.get("revision")
    named = isinstance(base, str) and base and "\0" not in base
    if not named or not isinstance(revision, str | None):
        raise UnsupportedError(
            f"model.path: {path} holds adapters but does not name their base model ({BASE}, "
            f"revision in {ADAPTER_CONFIG}); give it as model.path, and set start: {{path: {path}}}"
        )
    lora = model.lora or lora_of(path, config)
    overrides = given_json(path / SOURCE, overrides=dict).get("overrides", {})
    base_model = replace(
        model,
        path=base,
        revision=model.revision or revision,
        overrides={**overrides, **model.overrides},
        lora=lora,
    )
    return base_model, str(path)


def lora_of(path: Path, config: Mapping[str, Any]) -> LoraConfig:
    """Return the LoraConfig of the adapters in a folder. Raises UnsupportedError."""
    refuse_other_kinds(path, config)
    with open_tensors(path / ADAPTER_TENSORS) as file:
        names = {name.split(".lora_")[0] for name in set(file.keys()) if ".lora_" in name}
    values = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": sorted({name.rpartition(".")[2] for name in names}),
        "dropout": config.get("lora_dropout", 0.0),
    }
    try:
        return build(LoraConfig, values)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"model.path: adapters like those of {path} cannot be trained: {error}; give "
            "model.lora yourself"
        ) from error


def refuse_other_kinds(path: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for adapters that a run cannot train."""
    given = [name for name in OTHER_KINDS if config.get(name)]
    for name, plain in (("peft_type", "LORA"), ("bias", "none")):
        if config.get(name, plain) != plain:
            given.append(name)
    if given:
        named = ", ".join(f"{name}: {config[name]!r}" for name in given)
        raise UnsupportedError(
            f"{path / ADAPTER_CONFIG}: {named}: a run trains only plain LoRA; merge these "
            "adapters (farspan merge) and start from the whole model"
        )


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first, or `path` alone if it is a checkpoint
    itself. Raises UnsupportedError if there is no checkpoint."""
    if path.is_dir() and manifest_path(path).is_file():
        return [path]
    checkpoints = list_checkpoints(path / "checkpoints")
    if checkpoints:
        return checkpoints
    if (path / "config.json").is_file():
        raise UnsupportedError(
            f"start.path: {path} is a whole model: give it as model.path instead"
        )
    raise UnsupportedError(
        f"start.path: {path} has no checkpoint: expected the folder of a run that has saved one, "
        "a checkpoint in it (checkpoints/step-...), or a folder of adapters"
    )


def as_begun(run: RunConfig) -> RunConfig:
    """Return the run with two values as at its first start, read from its folder unless the command
    sets them: `start`, and the date that chat templates insert (`data.day`; today for a new run).

    Raises:
        UnsupportedError: The folder's config.yaml has an invalid `start`.
    """
    config, known = Path(run.folder).expanduser() / "config.yaml", dict[str, Any]()
    if config.is_file():
        try:
            known = read_file(config)
        except UnsupportedError:
            return run  # the run folder refuses it later, if it matters
    start, data = known.get("start"), known.get("data")
    if run.start is None and start is not None:
        run = replace(run, start=build(StartConfig, start, f"{config}: start"))
    if run.data.day is not None or not run.data.has_records():
        return run
    day = data.get("day") if isinstance(data, dict) else None
    if not known:
        day = date.today().isoformat()
    return replace(run, data=replace(run.data, day=day))


def begin(model: Any, run: RunConfig, note: Callable[[str], None]) -> None:
    """Copy the weights of `start` (another run or adapters) into a loaded model. Does nothing if a
    checkpoint will replace them: this run's or, with `start.states`, the other run's. Raises
    UnsupportedError naming the field."""
    start = run.start
    if start is None or list_checkpoints(Path(run.folder).expanduser() / "checkpoints"):
        return
    path = Path(start.path).expanduser()
    if is_adapters(path):
        if start.states:
            raise UnsupportedError(
                f"start.states: {path} holds only adapters; leave start.states out "
                "(--with-states), or name the run or the checkpoint that wrote them"
            )
        copy_adapters(path, model, run)
    elif start.states:
        refuse_other_adapters(run, checkpoints_of(path)[-1])
        return
    else:
        read = partial(_copy, model, run, note)
        path = latest(checkpoints_of(path), read, note)
    note(f"start: begins with the weights of {path}")


def latest(paths: Sequence[Path], read: Callable[[Path], T], note: Callable[[str], None]) -> T:
    """Return `read(path)` for the latest checkpoint that `read` accepts, trying older ones after an
    UnsupportedError. Raises UnsupportedError if none is accepted."""
    problems: list[UnsupportedError] = []
    for path in reversed(paths):
        try:
            value = read(path)
        except UnsupportedError as problem:
            problems.append(problem)
            continue
        for passed in problems:
            note(f"start: {passed}; beginning from {path} instead")
        return value
    raise UnsupportedError(f"start: {problems[0]}; {ELSEWHERE}")


def _copy(model: Any, run: RunConfig, note: Callable[[str], None], path: Path) -> Path:
    refuse_other_adapters(run, path)
    state = copy_weights(path, model_tensors(model))
    if FROZEN in state and state[FROZEN] != frozen_digest(model):
        note(f"start: the frozen weights differ from those that {path} was trained with")
    return path


def copy_weights(path: Path, live: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copy the weights of a checkpoint, in any dtype, into the tensors of an unsharded model, and
    return the checkpoint's state. Raises UnsupportedError if the checkpoint is damaged or, before
    copying, if its tensors do not match."""
    alone, entries = DistributedContext(torch.device("cpu")), entries_of(live, {})
    saved = open_checkpoint(path, {}, alone)
    refuse_other_model(saved, entries, (RNG, "optimizer/"), alone, any_dtype=True)
    with torch.no_grad():
        copy_saved(saved, entries, alone)
    return saved.state


def refuse_other_adapters(run: RunConfig, checkpoint: Path) -> None:
    """Raise UnsupportedError if only one of this run and the checkpoint's run has adapters, or if
    their rank or alpha differ: the saved tensors do not show alpha."""
    config = checkpoint.parent.parent / "config.yaml"
    if not config.is_file():
        return
    model = read_file(config).get("model")
    there = model.get("lora") if isinstance(model, Mapping) else None
    here = run.model.lora
    if here is None and there is not None:
        raise UnsupportedError(
            f"{checkpoint} holds adapters: give model.lora to train them further, or merge "
            "them (farspan merge)"
        )
    if here is not None and there is None:
        raise UnsupportedError(
            f"{checkpoint} holds a model that was trained without model.lora; "
            f"to train adapters, give its folder as model.path ({config.parent / 'model'})"
        )
    if here is not None:
        known = build(LoraConfig, there or {}, str(config))
        _refuse_scale(here, known.rank, known.scale(), checkpoint)


def _refuse_scale(here: LoraConfig, rank: int, alpha: float, where: Path) -> None:
    if here.rank != rank or here.scale() / here.rank != alpha / rank:
        raise UnsupportedError(
            f"the adapters of {where} have rank {rank} and alpha {alpha:g}, but model.lora has "
            f"{here.rank} and {here.scale():g}; set model.lora to rank: {rank}, alpha: {alpha:g}"
        )


def copy_adapters(path: Path, model: Any, run: RunConfig) -> None:
    """Copy adapters that peft saved in a folder to a model with adapters. Raises UnsupportedError,
    before copying, if they do not match the model's."""
    if run.model.lora is None:
        raise UnsupportedError(
            f"start: {path} holds adapters; give model.lora to train them further"
        )
    config = expect_json(path / ADAPTER_CONFIG)
    refuse_other_kinds(path, config)
    _refuse_scale(run.model.lora, *rank_and_alpha(path / ADAPTER_CONFIG, config), path)
    live = {
        f"base_model.model.{name.replace('.default.', '.')}": p.detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    with open_tensors(path / ADAPTER_TENSORS) as file, torch.no_grad():
        saved: dict[str, Tensor] = {name: file.get_tensor(name) for name in set(file.keys())}
    for name in sorted(saved.keys() ^ live.keys()):
        where = path if name in saved else "the run"
        raise UnsupportedError(
            f"start: the adapters differ: only {where} has {name}; set model.lora as for {path}"
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise UnsupportedError(
                f"start: {name} has the shape {list(saved[name].shape)} in {path}, but "
                f"{list(tensor.shape)} in this run; set model.lora as for {path}"
            )
    for name, tensor in live.items():
        tensor.copy_(saved[name])
