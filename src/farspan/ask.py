"""Turn a user's request into a question for the planner: `farspan.plan(...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, Protocol

from farspan.formatting import (
    EXAMPLE,
    as_meant,
    did_you_mean,
    read_memory,
    read_sparse,
    read_tokens,
)
from farspan.lazy import load
from farspan.planner.machines import HOST_RESERVE, count_of, with_main_memory
from farspan.planner.machines import machine as find_machine
from farspan.planner.plans import best_plan
from farspan.planner.request import (
    SHARE,
    Open,
    Optimizer,
    Plan,
    Question,
    loss_of,
    margin_of,
)
from farspan.profile.model import Variant
from farspan.profile.store import Measure, Profiles, find_profiles, profiles_of
from farspan.program.layout import Layout, packed_layout, sequence_layout
from farspan.program.strategies import AUTO, STRATEGIES, check_name
from farspan.spec import (
    Kernels,
    LossKind,
    MachineSpec,
    ModelSpec,
    Quantization,
    Reference,
    RunSpec,
    Sparse,
    Tier,
    UnsupportedError,
    dtype_name,
)

HERE = "here"

# Names of optimizers in `optimizer.states` of a run file; `host` has one name in both.
AS_IN_RUN_FILES = {"device": Optimizer.ADAMW, "8bit": Optimizer.ADAMW8BIT}

P = ParamSpec("P")


class Configuration(Protocol):
    """A transformers configuration, or any object that has a method `to_dict`."""

    def to_dict(self) -> dict[str, Any]: ...


Config = str | Path | Mapping[str, Any] | Configuration | ModelSpec | Profiles


def _discard(_: str) -> None:
    """Discard a message: the default of `Request.progress`."""


def _meta(help: str, *flags: str, reads: type = str, metavar: str | None = None) -> dict[str, Any]:
    """Return metadata that makes a field an option of `farspan plan`, named like the field or as in
    `flags`. The command line parses the option's text by `reads`. In `help` it replaces {models} by
    the presets' names and {cards} by the cards'."""
    return {"help": help, "flags": flags, "reads": reads, "metavar": metavar}


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata=_meta(help, **more))


@dataclass(frozen=True, slots=True)
class Request:
    """Options of a request to the planner. Sizes are numbers, or text that `formatting` reads.

    `config` may be a configuration or its fields, or a ModelSpec, which has its own dtype and
    adapters. `batch` counts for each group of devices that shares a sequence.
    """

    config: Config = field(
        metadata=_meta(
            "Instead of a run file: folder, config.json, hub name (its configuration only), or a "
            "preset: {models}.",
            "--model",
        )
    )
    context: str | int = field(
        metadata=_meta("Tokens of a sequence: 131072, 128K, 1M; K and M are 2**10 and 2**20.")
    )
    machine: str | Path | MachineSpec = field(
        default=HERE,
        metadata=_meta(
            "A card by any usual name (4090, H100 PCIe, 8xh100), a file of `farspan calibrate`, "
            "or `here` (measured once); cards: {cards}.",
            "--machine",
            "--gpu",
        ),
    )
    gpus: int = _option(1, "Devices that share the sequence; default: 1.", metavar="COUNT")
    batch: int = _option(1, "Sequences per step; default: 1.", reads=int)
    strategy: str = _option(
        AUTO, f"{AUTO}, the default: the best of all; or one of {', '.join(STRATEGIES)}."
    )
    optimizer: str = _option(
        AUTO,
        f"{AUTO}, the default: AdamW, with its states in the fastest place that fits; "
        f"or {', '.join(Optimizer)}; or as in a run file: "
        f"{', '.join((*AS_IN_RUN_FILES, Optimizer.HOST, Optimizer.DISK))}.",
    )
    weights: str = _option(
        AUTO,
        f"Tier of weights and gradients: {AUTO}, the default, device or host. With host, "
        "optimizer states are in main memory or on a drive, and the device holds only two groups "
        "of layers, the embedding and the head. With several devices, each moves its own shards.",
    )
    disk: str | None = _option(
        None, "A folder on a drive for optimizer states that fit nowhere else."
    )
    lora: int = _option(
        0, "Rank of adapters on every linear module; 0, the default: no adapters.", reads=int
    )
    quantize: str | None = _option(
        None,
        f"{', '.join(Quantization)}, with --lora: store the frozen weights of linear modules in "
        "four bits (QLoRA).",
    )
    dtype: str = _option("bfloat16", "bf16, fp32 or fp64; default: bf16.")
    device_memory: str | int | None = _option(
        None, "Memory of one device, replacing the machine's: 80GB, 80GiB."
    )
    host_memory: str | int | None = _option(
        None,
        "Main memory of the node, replacing the machine's: 128GiB, 128G; "
        f"{HOST_RESERVE:.0%} is left to the system, processes and loading.",
    )
    margin: str | int | None = _option(
        None,
        "Device memory and main memory to leave free, if any plan can: 3GiB, 5%, 0; a "
        f"share includes the machine's reserve; default: {SHARE:.0%} of a device.",
    )
    sparse: Sparse | None = field(
        default=None,
        metadata=_meta(
            "Page-sparse attention, an approximation: on (8K tokens of chosen pages and 4K "
            f"recent ones), off, or fields such as {EXAMPLE}."
        ),
    )
    loss: str = _option(
        LossKind.SFT,
        f"{', '.join(LossKind)}; default: {LossKind.SFT}. The others are computed from "
        "log-probabilities; a pair of answers is one sequence of --context tokens.",
    )
    reference: str | None = _option(
        None,
        f"Reference of a loss that compares with one: {', '.join(Reference)}; default: "
        f"{Reference.STORED} if the loss needs one.",
    )
    kernels: Kernels = field(default_factory=Kernels)  # implementations of each operation
    progress: Callable[[str], None] = _discard  # receives messages while measuring

    def __post_init__(self) -> None:
        """Replace other tools' words in values by farspan's; refuse None where a default exists."""
        if isinstance(self.sparse, str):
            object.__setattr__(self, "sparse", read_sparse(self.sparse))
        for name in ("optimizer", "weights", "strategy", "loss", "dtype", "kernels"):
            if getattr(self, name) is None:
                raise UnsupportedError(f"{name}: got None; leave {name} out for the default")
        for name in ("optimizer", "weights", "strategy", "loss", "reference"):
            if isinstance(word := getattr(self, name), str):
                object.__setattr__(self, name, as_meant(word))

    def question(self) -> Question:
        """Return the planner's input for the request. Raises UnsupportedError naming the option."""
        model, profiles = self._model()
        adapters = bool(self.lora) or model.trainable < model.parameters
        loss = loss_of(self.loss, self.reference, adapters=adapters)
        if loss.is_cut and self.sparse is not None:
            raise UnsupportedError(f"sparse: not supported with loss {loss.kind}; leave one out")
        weights = _weights(self.weights, self.optimizer)
        optimizer = _optimizer(self.optimizer, weights)
        free = Open(self.optimizer == AUTO, self.weights == AUTO, self.disk is not None)
        layout = _layout(self._count(), model)
        if self.quantize is not None:
            layout = packed_layout(None, layout)
        run = RunSpec(self.batch, read_tokens(self.context, "context"))
        machine = self._machine()  # last: it may have to be measured
        question = Question(
            model=model,
            run=run,
            machine=machine,
            layout=layout,
            optimizer=optimizer,
            weights=weights,
            open=free,
            dtype=dtype_name(self.dtype),
            overlap=machine.pinned and not machine.unified,  # matches how the engine runs copies
            sparse=self.sparse,
            kernels=self.kernels,
            margin=margin_of(self.margin, machine),
            nf4=self.quantize is not None,
            loss=loss,
            profiles=profiles,
        )
        return as_run(question, self.lora)

    def strategies(self) -> list[str] | None:
        """Return the strategies that the planner may use; None: all. Raises UnsupportedError."""
        if self.strategy == AUTO:
            return None
        check_name(self.strategy)
        return [self.strategy]

    def _model(self) -> tuple[ModelSpec, Profiles | None]:
        self._check_quantize()
        if isinstance(self.config, ModelSpec):
            return self.config, None
        profiles, dtype = _profiles(self.config), dtype_name(self.dtype)
        _check_rank(self.lora)
        if self.lora:
            _check_width(self.lora, profiles.widest_rank())
        return profiles.of(Variant(dtype, profiles.rank(self.lora))).spec, profiles

    def _check_quantize(self) -> None:
        if self.quantize is None:
            return
        wrong = None
        if Quantization._missing_(self.quantize) is None:
            wrong = (
                f"expected {' or '.join(Quantization)} (four bits), got {self.quantize!r}, which "
                "farspan does not support; give lora 16 and quantize nf4"
            )
        elif isinstance(self.config, ModelSpec):
            wrong = "a ModelSpec cannot be quantised; give a model that can be profiled"
        elif not self.lora and not isinstance(self.config, Profiles):
            wrong = "quantised weights are not trained; give lora, the rank of adapters, such as 16"
        elif dtype_name(self.dtype) == "float64":
            wrong = "quantised weights cannot compute in float64; give dtype bf16 or fp32"
        if wrong is not None:
            raise UnsupportedError(f"quantize: {wrong}")

    def _count(self) -> int:
        """Return the number of devices, set by `gpus` or by a machine such as `8xh100`."""
        counted = count_of(self.machine)
        if counted is None or self.gpus in (1, counted):
            return counted or self.gpus
        raise UnsupportedError(
            f"gpus: {self.gpus}, but {counted} in machine {self.machine!r}; give one of the two"
        )

    def _machine(self) -> MachineSpec:
        found: object = self.machine
        if found == HERE:
            found = _here(self.progress)
        elif isinstance(found, str | Path):
            found = find_machine(found)
        if not isinstance(found, MachineSpec):
            raise UnsupportedError(
                f"machine: expected a preset's name, a file, 'here' or a MachineSpec, got {found!r}"
            )
        if self.device_memory is not None:
            if found.unified:
                raise UnsupportedError(
                    f"device_memory: {found.name} has one memory for both tiers; give host_memory"
                )
            size = read_memory(self.device_memory, "device_memory")
            found = replace(found, device_bytes=size)
        if self.host_memory is not None:
            found = with_main_memory(found, read_memory(self.host_memory, "host_memory"))
        return found


def as_run(question: Question, lora: int = 0) -> Question:
    """Return the planner's input with sizes and profile of the model as it will run: with adapters
    of rank `lora`, or without any."""
    if question.profiles is None:
        return question
    profile = question.profile
    rank = question.profiles.rank(lora) if profile is None else profile.variant.rank
    profile, name = question.profiles.of(question.variant(rank)), question.model.name
    model = profile.spec if profile.spec.name == name else replace(profile.spec, name=name)
    return replace(question, model=model, profile=profile)


def _takes_fields(
    request: Callable[P, Request],
) -> Callable[[Callable[[Request], Plan]], Callable[P, Plan]]:
    """Decorate a function: it takes a request's fields as arguments, all but the first by name, and
    raises UnsupportedError for other options."""
    first, *others = signature(request).parameters.values()
    named = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in others]
    known = [first.name, *(option.name for option in named)]
    taken = Signature([first, *named], return_annotation=Plan)

    def asked(function: Callable[[Request], Plan]) -> Callable[P, Plan]:
        @wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> Plan:
            for name in options:
                if name not in known:
                    raise UnsupportedError(
                        f"{name}: farspan.plan has no such option{did_you_mean(name, known)}; "
                        f"expected some of {', '.join(known)}"
                    )
            try:
                given = taken.bind(*arguments, **options)
            except TypeError as error:
                raise TypeError(f"farspan.plan: {error}") from None
            return function(request(*given.args, **given.kwargs))

        checked.__signature__ = taken  # type: ignore[attr-defined]
        return checked

    return asked


@_takes_fields(Request)
def plan(request: Request) -> Plan:
    """Find the best schedule for a model, a context and a machine, and predict its step.

    No weights are read. A model that is no preset is run once on the meta device, which needs
    torch.

    Args:
        config: A preset such as "Qwen2.5-7B", a folder or file with a configuration, a name on the
            hub, a transformers configuration or its fields.
        context: Tokens of the whole sequence; "1M" is 2**20.
        machine: A preset such as "h200", a file that `farspan calibrate` wrote, or "here", which
            measures this machine unless it was measured before.
        options: Fields of `Request`, which has their defaults; bytes are numbers or text such as
            "128GiB".

    Returns:
        The plan; `print` shows it as `farspan plan` does. If nothing fits, the plan that misses by
        the least: its `fits` is false and its `remedies` name changes that would help.

    Raises:
        UnsupportedError: An option is unknown, or its value makes no sense.
    """
    return best_plan(request.question(), request.strategies())


def _profiles(config: str | Path | Mapping[str, Any] | Configuration | Profiles) -> Profiles:
    if isinstance(config, Profiles):
        return config
    if isinstance(config, str | Path):
        return find_profiles(str(config), measuring)
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise UnsupportedError(
            "config: expected a preset's name, a folder, a file, a hub name, a transformers "
            f"configuration or its fields, got {type(config).__name__}"
        )
    fields = config if isinstance(config, Mapping) else config.to_dict()
    name = str(fields.get("_name_or_path") or fields.get("model_type"))
    return profiles_of(fields, name, measuring=measuring)


@dataclass(frozen=True, slots=True)
class Measuring:
    """Callable that imports and returns `measure`, which profiles models without a preset and needs
    torch. Its instances can be pickled, and so sent to ranks."""

    def __call__(self) -> Measure:
        found: Measure = load("farspan.engine.profile", "measure")
        return found


measuring = Measuring()


def _here(progress: Callable[[str], None]) -> MachineSpec:
    """Measure this machine. The code for it needs torch, and is imported only now."""
    try:
        measure: Callable[[Callable[[str], None]], MachineSpec] = load(
            "farspan.engine.calibrate", "here"
        )
    except ImportError as error:
        raise UnsupportedError(
            f"machine: measuring this machine needs torch and transformers ({error}); pip install "
            "farspan, which has them, or name a preset or a machine file"
        ) from error
    return measure(progress)


def _check_rank(rank: object) -> None:
    if type(rank) is not int or rank < 0:
        raise UnsupportedError(
            f"lora: expected the rank of adapters, such as 16, or 0 to train all, got {rank!r}"
        )


def _check_width(rank: int, widest: int) -> None:
    if rank > widest:
        raise UnsupportedError(
            f"lora: rank {rank} is above {widest}, the narrower side of the largest linear module "
            f"of a layer, where an adapter is a whole matrix; give {widest} or less"
        )


def _optimizer(name: str, weights: Tier) -> Optimizer:
    if name == AUTO:
        return Optimizer.HOST if weights is Tier.HOST else Optimizer.ADAMW
    found = AS_IN_RUN_FILES.get(name, name)
    if found not in tuple(Optimizer):
        known = ", ".join((AUTO, *Optimizer, *AS_IN_RUN_FILES))
        raise UnsupportedError(
            f"optimizer: expected one of {known}, got {name!r}"
            + did_you_mean(name, (*Optimizer, *AS_IN_RUN_FILES))
        )
    return Optimizer(found)


def _weights(name: str, optimizer: str) -> Tier:
    if name not in (AUTO, *Tier):
        raise UnsupportedError(f"weights: expected {AUTO}, {' or '.join(Tier)}, got {name!r}")
    if name != Tier.HOST:
        return Tier.DEVICE
    if optimizer not in (AUTO, Optimizer.HOST, Optimizer.DISK, Optimizer.NONE):
        raise UnsupportedError(
            f"weights: host needs optimizer states off the device, got {optimizer}; give optimizer "
            f"{Optimizer.HOST} or {Optimizer.DISK}, or weights {Tier.DEVICE}"
        )
    return Tier.HOST


MOST_DEVICES = 2**16  # per sequence; no machine has as many


def _layout(gpus: int, model: ModelSpec) -> Layout:
    """Return a layout in which all devices share each sequence. Raises UnsupportedError."""
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise UnsupportedError(f"gpus: expected a whole number of devices >= 1, got {gpus!r}")
    if gpus > MOST_DEVICES:
        raise UnsupportedError(
            f"gpus: expected at most {MOST_DEVICES:,} devices, got {gpus:,}; give fewer"
        )
    return sequence_layout(model, gpus)
