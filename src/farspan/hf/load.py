"""Load a causal LM from a folder, a hub name or a configuration; add and save LoRA adapters.

Only this module and `merge` use peft.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from farspan.durable import read_json, refuse_pipes
from farspan.hf import quantized
from farspan.hf.indexer import indexed_parameters
from farspan.hf.overrides import SPELLINGS, changed, refuse_idle, refuse_unknown, resolve
from farspan.hf.stages import CausalLMStages
from farspan.hf.swap import put_in
from farspan.hf.unsupported import freeze_unmet, ropes
from farspan.lazy import load
from farspan.profile.catalog import (
    find_config,
    is_on_hub,
    pinned,
    read_config,
    refuse_absent,
    refuse_huge,
    with_revision,
)
from farspan.spec import UnsupportedError

LARGE = 2**24  # elements of a large tensor
BETWEEN = 2**20  # bytes of a weights' file outside tensors: its header
MAPS = Path("/proc/self/maps")  # on Linux: this process's memory, and files mapped in it
NAMES_SHOWN = 5  # of missing weights: a wrong folder lacks hundreds
ADAPTERS = (
    "model.path: {path} holds adapters, which would be applied to the model but not trained; "
    "give the folder of a model without adapters: the one they belong to, or one they were "
    "merged into (farspan merge)"
)


class Weights(StrEnum):
    SAVED = "saved"  # those of the path; a config has none, so they are random
    RANDOM = "random"
    NONE = "none"  # parameters on the meta device, to be filled later


def load_config(
    *,
    path: str | None,
    config: dict[str, Any] | None,
    overrides: dict[str, Any],
    trust_remote_code: bool = False,
    revision: str | None = None,
    drawn: bool = False,
    dtype: torch.dtype | None = None,
) -> PretrainedConfig:
    """Load the model's configuration with `overrides` applied (rope_parameters,
    attention_dropout...).

    Args:
        path: A local folder, or a hub name of `revision` (a commit or branch).
        config: A dict with `model_type`, instead of `path`.
        overrides: Fields that replace those of config.json; in a nested configuration or the
            parameters of RoPE, only the named entries change.
        drawn: Whether weights are random although `path` may have some.
        dtype: Dtype of the weights, which overrides must agree with.

    Raises:
        UnsupportedError: The model is unknown, an override is no field of its config or makes no
            difference to the model, or trusted code is not pinned.
    """
    if (path is None) == (config is None):
        raise UnsupportedError(
            "model: give either path (a folder or a hub name) or config, not both"
        )
    if path is not None:
        found = _config_at(path, trust_remote_code, revision)
        quantized.refuse_untrainable(found, path)
    else:
        assert config is not None
        found = _config_of(config)
    _refuse_no_layers(found)

    if not overrides:
        return found
    _refuse_other_dtype(overrides, dtype)
    fields = config or {}
    if path is not None:
        fields = PretrainedConfig.get_config_dict(path, **pinned(revision))[0]
    make = partial(_blank, overrides, trust_remote_code, revision)
    return _overridden(found, fields, overrides, make, drawn=path is None or drawn)


def _blank(
    overrides: dict[str, Any],
    trust_remote_code: bool,
    revision: str | None,
    config: PretrainedConfig,
) -> PreTrainedModel:
    with _naming(overrides):
        return blank_model(config, torch.float32, trust_remote_code, revision)


def config_for_planning(
    *,
    path: str | None,
    config: dict[str, Any] | None,
    overrides: dict[str, Any],
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> PretrainedConfig:
    """Load a configuration as `load_config` does, also of a model that is not on this machine:
    `path` may be the hub name of a model that `farspan plan` knows. No code of the model runs."""
    if path is None:
        return load_config(path=None, config=config, overrides=overrides, dtype=dtype)
    if not is_on_hub(path):
        refuse_absent("model.path", path)
    fields = find_config(with_revision(path, revision))
    found = config_from_fields(fields)
    _refuse_other_dtype(overrides, dtype)
    make = partial(_blank, overrides, False, None)
    return _overridden(found, _decoded(dict(fields)), overrides, make, drawn=False)


def config_from_fields(fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration for a config.json's content. Raises UnsupportedError."""
    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"model_type: transformers {transformers.__version__} has no {kind!r}; check the "
            "name, or install a release that has it"
        )
    try:
        found: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(_decoded(dict(fields)))
    except Exception as error:  # each family checks its own fields
        raise UnsupportedError(
            f"model: transformers cannot read these fields of a {kind} configuration: "
            f"{type(error).__name__}: {error}"
        ) from error
    return found


def _decoded(value: Any) -> Any:
    """Return a JSON value in which {"__float__": "Infinity"} and the like are floats again."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(field) for name, field in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def load_model(
    *,
    path: str | None = None,
    config: dict[str, Any] | None = None,
    dtype: torch.dtype,
    overrides: dict[str, Any] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    weights: Weights = Weights.SAVED,
    revision: str | None = None,
    nf4: bool = False,
    known: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Load a model in training mode. Only safetensors weights are read.

    Modules that text does not reach, such as an encoder of images, are frozen. Warns of saved
    weights that the model has no place for.

    Args:
        seed: Seed of random weights.
        weights: Saved, random or none.
        nf4: Pack saved weights of linear modules to four bits an element as they are read.
        known: The result of `load_config` for the same arguments, if already read.

    Raises:
        UnsupportedError: The folder holds no weights, or not all that the model has.
    """
    made = copy.deepcopy(known) or load_config(  # a model changes its configuration
        path=path,
        config=config,
        overrides=overrides or {},
        trust_remote_code=trust_remote_code,
        revision=revision,
        drawn=weights is Weights.RANDOM,
        dtype=dtype,
    )
    if dtype is torch.float64:
        made._experts_implementation = "eager"  # torch's grouped product has no float64
    with _naming(overrides or {}):
        if weights is Weights.NONE:
            return blank_model(made, dtype, trust_remote_code, revision)
        if path is None or weights is Weights.RANDOM:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model: Any = _with_random_weights(made, dtype, trust_remote_code, revision)
        else:
            packing = quantized.arguments(made, nf4, dtype, device)
            given = {**pinned(revision), **packing}
            model = _with_saved_weights(path, made, dtype, trust_remote_code, given)
    model = _prepared(model, dtype)
    _leave_files(model)
    return model.to(device)


def _leave_files(model: nn.Module) -> None:
    """Copy tensors out of memory-mapped weight files of which the model uses little: one tensor
    keeps its whole file in memory, such as 528 MiB for 109 MiB of embeddings of a 135M model in
    four bits."""
    if not MAPS.exists():
        return
    weights = (*model.parameters(), *model.buffers())
    parts = [part for weight in weights for part in quantized.parts_of(weight) if not part.is_meta]
    for line in MAPS.read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        inside = [part for part in parts if inode != "0" and first <= part.data_ptr() < last]
        if inside and last - first - sum(part.nbytes for part in inside) > BETWEEN:
            for part in inside:
                part.data = part.detach().clone()


def blank_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """Make a model in training mode with parameters on the meta device. Raises UnsupportedError."""
    with _without_weights():
        model = _with_random_weights(config, dtype, trust_remote_code, revision)
    return _prepared(model, dtype)


def resize_embeddings(model: PreTrainedModel, rows: int, seed: int) -> None:
    """Extend the model's embeddings and head to at least `rows` token ids, in place. New rows are
    drawn from `seed`, about the mean of the old rows."""
    found: Any = model.get_input_embeddings()
    if found.num_embeddings < rows:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.resize_token_embeddings(rows, mean_resizing=not found.weight.is_meta)


def _refuse_other_dtype(overrides: dict[str, Any], dtype: torch.dtype | None) -> None:
    for name in ("dtype", "torch_dtype"):
        asked = str(overrides.get(name, dtype)).removeprefix("torch.")
        if dtype is not None and asked != str(dtype).removeprefix("torch."):
            raise UnsupportedError(
                f"model.overrides.{name}: {asked}, but weights are made in the dtype of the run; "
                f"set model.dtype: {asked}"
            )


def _prepared(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    freeze_unmet(model)
    quantized.settle(model, dtype)
    if dtype is torch.float64:
        # Transformers 5.24 keeps a router of DeepSeek-V3's kind in float32 whatever the dtype,
        # which is meant for narrower ones.
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model.train()


@contextmanager
def _naming(overrides: dict[str, Any]) -> Iterator[None]:
    """Inside the context, add the overrides to the error that a family's own code raises if it
    cannot make the model, since that error names no fields."""
    try:
        yield
    except UnsupportedError as error:
        if not overrides:
            raise
        given = ", ".join(f"model.overrides.{name}: {value}" for name, value in overrides.items())
        raise UnsupportedError(f"{error}; check {given}") from error


class _LargeAreBlank(TorchFunctionMode):
    """Mode that puts tensors of torch.empty with over 2^24 elements on the meta device. A layer's
    experts in DeepSeek-V3 are one tensor of 30 GB, made before it is registered as a parameter."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            blank = func(*args, **{**kwargs, "device": "meta"})
            if blank.numel() > LARGE:
                return blank
        return func(*args, **kwargs)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Inside the context, put parameters that modules register on the meta device. Buffers stay:
    many are computed from the configuration and stored in no file."""
    module: Any = nn.Module
    register = module.register_parameter

    def register_blank(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    with put_in([(module, "register_parameter", register_blank)]), _LargeAreBlank():
        yield


def _with_random_weights(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, revision: str | None
) -> PreTrainedModel:
    remote = trust_remote_code and getattr(config, "auto_map", None)
    code = {"code_revision": revision} if remote else {}
    try:
        made: PreTrainedModel = _auto(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **code
        )
        return made
    except Exception as error:  # any error of the family's own code
        raise UnsupportedError(
            f"model: transformers cannot make a {type(config).__name__} model of these fields: "
            f"{type(error).__name__}: {error}"
        ) from error


def _auto(config: PretrainedConfig) -> Any:
    """Return transformers' auto class for a configuration: for causal LMs, or for image-text models
    if only that class knows the configuration."""
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if seeing and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _with_saved_weights(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    arguments: dict[str, Any],
) -> PreTrainedModel:
    refuse_pipes(*Path(path).glob("*"))
    try:
        loaded: Any = _auto(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **arguments,
        )
    except Exception as error:  # unreadable files, sizes that do not match, other kinds
        raise UnsupportedError(
            "model.path: transformers could not load a causal LM from the safetensors weights of "
            f"{path!r}: {type(error).__name__}: {error}"
        ) from error
    model, found = loaded
    if getattr(model, "peft_config", None):
        raise UnsupportedError(ADAPTERS.format(path=path))
    # transformers leaves out weights that it derives from others, such as a tied head.
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    if missing:
        raise UnsupportedError(
            f"model.path: {path} holds no weights for {_few(missing)}, which would start from "
            "random numbers; give the folder of a complete causal LM, or train from model.config"
        )
    if unexpected:
        warnings.warn(
            f"model.path: {path} holds weights that {type(model).__name__} has no place for: "
            f"{_few(unexpected)}; they are ignored",
            stacklevel=3,
        )
    return model


def _few(names: set[str]) -> str:
    shown = sorted(names)[:NAMES_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


_COMMIT = re.compile(r"[0-9a-f]{40}")


def refuse_unpinned(
    path: str, trust_remote_code: bool, revision: str | None, field: str = "model.revision"
) -> None:
    """Raise UnsupportedError for model code that may change later, unlike code in a folder or of a
    hub commit."""
    if not trust_remote_code or _COMMIT.fullmatch(revision or ""):
        return
    files = [Path(path).expanduser() / f"{kind}config.json" for kind in ("", "tokenizer_")]
    maps = [str((read_json(file, finite=False) or {}).get("auto_map")) for file in files]
    if is_on_hub(path) or any("--" in text for text in maps):
        given = "missing" if revision is None else f"{revision!r} is a branch or a tag"
        own = field == "model.revision"
        raise UnsupportedError(
            f"{field}: {given if own else path}: trust_remote_code runs Python code that comes "
            f"with {path} from the hub, and that code may change at any time; "
            + (
                "set it to the commit (40 hexadecimal digits) whose code you have read"
                if own
                else "give a folder with the code in it"
            )
        )


def _config_at(path: str, trust_remote_code: bool, revision: str | None) -> PretrainedConfig:
    refuse_absent("model.path", path)
    refuse_unpinned(path, trust_remote_code, revision)
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(ADAPTERS.format(path=path))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UnsupportedError(
            f"model.path: {path} holds no config.json; expected a saved model's folder"
        )
    try:
        file = cached_file(path, "config.json", revision=revision)
        read_config(Path(str(file)), "model.path")
        return AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **pinned(revision)
        )
    except UnsupportedError:
        raise
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"model.path: {path!r} is neither a folder with a model nor a hub name that can be "
            f"reached: {error}"
        ) from error


def _config_of(fields: dict[str, Any]) -> PretrainedConfig:
    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"model.config.model_type: {kind!r} is not a transformers model type; expected for "
            "example 'llama', 'qwen2' or 'mistral'"
        )
    refuse_huge(fields, "model.config.")
    values = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        made = AutoConfig.for_model(kind, **copy.deepcopy(values))  # it writes into nested fields
    except Exception as error:  # transformers checks combinations of fields with its own errors
        raise UnsupportedError(f"model.config: {' '.join(str(error).split())}") from error
    # Fields that transformers converts, such as rope_theta, are gone; unknown ones are kept.
    kept = {name: value for name, value in values.items() if name in vars(made)}
    refuse_unknown(AutoConfig.for_model(kind), list(kept), "model.config")
    given = {name: values[name] for name in SPELLINGS if values.get(name)}
    resolve(made, given, "model.config")  # refuses those that the family does not read
    for rope in ropes(made).values():
        if given and rope["rope_type"] == "default" and rope.get("factor"):
            raise UnsupportedError(
                f"model.config.{next(iter(given))}.factor: {rope['factor']} changes nothing under "
                "rope_type: default; give a rope_type that uses factor, or leave factor out"
            )
    return made


def _overridden(
    config: PretrainedConfig,
    fields: Mapping[str, Any],
    overrides: dict[str, Any],
    make: Callable[[PretrainedConfig], PreTrainedModel],
    drawn: bool,
) -> PretrainedConfig:
    """Return the configuration of a config.json's `fields` with overrides applied. Raises
    UnsupportedError if an override makes no difference to the model."""
    if not overrides:
        return config
    refuse_huge(overrides, "model.overrides.")
    changes = resolve(config, overrides)
    build = partial(changed, config, fields)
    made = build(changes)
    _refuse_no_layers(made)
    refuse_idle(make, build, changes, drawn)
    return made


def _refuse_no_layers(config: PretrainedConfig) -> None:
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if layers < 1:  # transformers would make a model without layers
        raise UnsupportedError(
            f"model: num_hidden_layers is {layers}, expected a whole number above 0"
        )


# -- adapters -----------------------------------------------------------------------------------


LINEAR = "linear"  # every linear module of the layers that adapters can train
_READ = "dt_proj"  # of Mamba's layers, which read its weight and do not call the module
_PACKED = "bitsandbytes.", "transformers.integrations."  # packages of quantised linear modules
ADAPTER = "default"  # peft's name for a single adapter
MISSING = (
    "model.lora: needs peft, which cannot be imported here ({error}); "
    'pip install "farspan[lora]", or leave model.lora out'
)


def add_adapters(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str] = LINEAR,
    seed: int = 0,
    dropout: float = 0.0,
    zero: bool = True,
) -> None:
    """Add LoRA to a PreTrainedModel, in place: freeze W and compute W x + alpha / rank * B(A(x)).

    A [rank, inner] and B [outer, rank] have the dtype and device of the weight W [outer, inner].

    Args:
        targets: Last parts of the names of linear modules in the layers, or LINEAR.
        seed: Seed of the random A.
        dropout: Probability with which training drops elements of A's input.
        zero: Whether B is zero; else it is random too, so that A has a gradient.

    Raises:
        UnsupportedError: A target is no linear module or peft reads it otherwise, the rank is above
            every module's narrower side, or peft is not installed.
    """
    try:
        config_type, inject = load("peft", "LoraConfig"), load("peft", "inject_adapter_in_model")
    except ImportError as error:
        raise UnsupportedError(MISSING.format(error=error)) from error
    modules = _targeted(_linears(model), targets)
    widest = max(min(quantized.shape_of(module.weight)) for module in modules.values())
    if rank > widest:
        raise UnsupportedError(
            f"model.lora.rank: {rank} is above {widest}, the narrower side of the largest linear "
            f"module; give {widest} or less"
        )
    config = config_type(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted(modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
        init_lora_weights=zero,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject(config, model)
        except ValueError as error:  # such as one of two names that it reads as halves of one
            said = f"peft does not accept them: {error}"
            raise _other_targets(modules, set(re.findall(r"'(\w+)'", said)), said) from error
    # The state after transformers' add_adapter, so that its save_pretrained saves adapters alone.
    # add_adapter itself is not called: 5.24 refuses every released peft, although all work with it.
    model._hf_peft_config_loaded = True
    for parameter in model.parameters():  # next to packed weights peft makes them float32
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    _check_adapted(model, modules)


def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save a model for `from_pretrained`, or only its adapters for `PeftModel.from_pretrained`;
    `weights`, if given, are saved instead of the model's."""
    adapters = getattr(model, "peft_config", {})
    if not isinstance(model, PreTrainedModel) or list(adapters) != [ADAPTER]:
        given = {} if weights is None else {"state_dict": weights}
        model.save_pretrained(folder, **given)
        return
    # By peft's functions: transformers' save_pretrained checks peft's version, as add_adapter does.
    named = load("peft", "get_peft_model_state_dict")(model, state_dict=weights)
    adapters[ADAPTER].save_pretrained(folder)
    save_file(
        {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def stacked_experts(model: nn.Module) -> bool:
    """Return whether all experts' weights are stacked in one tensor instead of linear modules."""
    return any(p.ndim == 3 and "expert" in name for name, p in model.named_parameters())


def _linears(model: Any) -> dict[str, Any]:
    """Return the linear modules of the layers that adapters can train, by name. Left out are those
    of an indexer, which have no gradient, and those that compute more than W x."""
    inside = {id(module) for layer in CausalLMStages(model).layers for module in layer.modules()}
    idle, own = indexed_parameters(model), (nn.Linear.forward, Conv1D.forward)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in inside
        if type(module).forward in own or type(module).__module__.startswith(_PACKED)
        if id(module.weight) not in idle and _last(name) != _READ
    }


def _targeted(linears: dict[str, Any], targets: str | Sequence[str]) -> dict[str, Any]:
    if not linears:
        raise UnsupportedError("model.lora: the layers of this model have no linear modules")
    if targets == LINEAR:
        return linears
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for target in wanted:
        if not any(_ends(name, target) for name in linears):
            known = ", ".join(sorted({*map(_last, linears)}))
            raise UnsupportedError(
                f"model.lora.targets: the layers have no linear module {target!r} that adapters "
                f"can train; expected {LINEAR}, or a list of {known}"
            )
    return {n: m for n, m in linears.items() if any(_ends(n, target) for target in wanted)}


def _check_adapted(model: Any, targets: dict[str, Any]) -> None:
    """Raise UnsupportedError if a target has no adapter because peft took it for stacked experts.
    peft goes by the experts' names before stacking, such as gate_proj, which dense layers and
    shared experts have too. It makes the same mistake when it loads saved adapters."""
    found = {name.partition(".lora_A.")[0] for name, _ in model.named_parameters()}
    if lost := {_last(name) for name in targets.keys() - found}:
        said = f"peft mistakes {', '.join(sorted(lost))} of {type(model).__name__} for its stacked "
        raise _other_targets(targets, lost, f"{said}experts, which are not linear modules")


def _other_targets(modules: Iterable[str], lost: set[str], said: str) -> UnsupportedError:
    left = sorted({*map(_last, modules)} - lost)
    advice = f"give {', '.join(left)}, or some of them" if lost and left else "give others"
    return UnsupportedError(f"model.lora.targets: {said.rstrip('.')}; {advice}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
