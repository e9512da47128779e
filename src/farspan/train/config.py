"""Configuration of a training run: model, data, loss, schedule, and the folder for results."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from farspan.data.config import DataConfig, LossConfig, RecordFormat, mismatch
from farspan.formatting import MOST_TOKENS, read_memory
from farspan.planner.request import read_margin
from farspan.program.layout import Auto, Parallel, replicas
from farspan.program.strategies import AUTO, check_name
from farspan.spec import (
    Kernels,
    LossKind,
    Quantization,
    Reference,
    Schedule,
    Sparse,
    Tier,
    UnsupportedError,
)
from farspan.train.yaml_config import build, read_file, with_settings

MOST_STEPS = 10**8 - 1  # checkpoints are named by eight digits
MOST_BATCHES = 2**20  # batches per update
MOST_PIECES = 2**16  # pieces of one sequence


class DType(StrEnum):
    """Dtype of parameters and activations. Gradients and optimizer states are float32, or float64
    if the parameters are float64."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class Decay(StrEnum):
    """Shape of the learning rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"  # warm-up, stable, decay: constant, then linear over the last `decay_steps`


class OnNonfinite(StrEnum):
    """Reaction to a loss or gradient that is NaN or infinite."""

    STOP = "stop"
    SKIP = "skip"


class DeviceAllocator(StrEnum):
    """Allocator of GPU memory: PyTorch's, or one from farspan's native library."""

    DEFAULT = "default"
    STITCH = "stitch"  # maps physical chunks behind any address range: memory does not fragment
    REPLAY = "replay"  # also places a step's tensors by a plan from an earlier step


class StatesPlace(StrEnum):
    """Memory that holds AdamW's states, and their number of bits."""

    AUTO = "auto"  # the device if they fit next to the step, else the host
    DEVICE = "device"  # fp32 masters and moments on the device
    HOST = "host"  # fp32 in main memory, where the update then runs: the same results
    DISK = "disk"  # fp32 in a file on a drive, updated in main memory: the same results
    EIGHT_BIT = "8bit"  # moments of one byte per element (torchao), no masters: other results


class ReportTo(StrEnum):
    """Trackers that receive metrics in addition to metrics.jsonl."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters, which are trained instead of the model's weights."""

    rank: int = 16  # rank of an adapter's two matrices
    alpha: float | None = None  # output is scaled by `alpha / rank`; null: twice the rank
    targets: str | tuple[str, ...] = "linear"  # `linear`: all linear modules of layers; or names
    dropout: float = 0.0  # probability that training drops an element of an adapter's input

    def __post_init__(self) -> None:
        _at_least(self.rank, 1, "rank")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise UnsupportedError(f"alpha: expected a number above 0, got {self.alpha}")
        if not self.targets:
            raise UnsupportedError("targets: expected linear, or names of linear modules, got none")
        if not 0 <= self.dropout < 1:
            raise UnsupportedError(f"dropout: expected 0 to below 1, got {self.dropout}")

    def scale(self) -> float:
        """Return alpha as a number: twice the rank if none is set."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def everywhere(self) -> int:
        """Return the LoRA rank if all linear modules have adapters without dropout, else 0."""
        return self.rank if self.targets == "linear" and not self.dropout else 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Weights to start from (`path`) or an architecture with random weights (`config`)."""

    path: str | None = None  # a local folder or a name on the hub
    config: dict[str, Any] | None = None  # for random weights: fields with `model_type`
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of the config to change
    dtype: DType = DType.FLOAT32  # dtype of weights and activations; or `fp32`, `bf16`, `fp64`
    revision: str | None = None  # commit or branch of a model on the hub
    trust_remote_code: bool = False  # run code that comes with a model; from the hub, by commit
    lora: LoraConfig | None = None  # null: train every weight
    quantize: Quantization | None = None  # with `lora`: keep frozen linear weights in four bits
    # Add rows for tokens added to the tokenizer, drawn around the mean of the existing rows.
    resize_embeddings: bool | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise UnsupportedError(
                "path: give either path (a folder or a hub name) or config (model_type and other "
                f"fields, for random weights), got {'neither' if self.path is None else 'both'}"
            )
        if self.config is not None and "model_type" not in self.config:
            raise UnsupportedError("config: model_type is missing; give one such as qwen2 or llama")
        if self.resize_embeddings is False:  # in folders from before this key existed
            object.__setattr__(self, "resize_embeddings", None)
        if self.resize_embeddings and (self.config or self.lora):
            what = (
                "random weights have the vocab_size of config; set vocab_size instead"
                if self.config
                else "adapters leave embeddings frozen, so the new rows would keep their random "
                "values; leave model.lora out, or train without it first, and give the model/ of "
                "that run as model.path"
            )
            raise UnsupportedError(f"resize_embeddings: {what}")
        if self.quantize is not None and (self.config or self.dtype is DType.FLOAT64):
            wrong = "cannot compute in float64" if self.config is None else "needs weights to read"
            raise UnsupportedError(
                f"quantize: {self.quantize} {wrong}; give path, in bfloat16 or float32"
            )

    def origin(self) -> dict[str, Any]:
        """Return the keyword arguments of `hf.load` that locate and change the model."""
        names = "path", "config", "overrides", "trust_remote_code", "revision"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """A strategy by name, and the fields of its Schedule that the run file replaces.

    With `strategy: auto` the planner chooses all fields. With `strategy: null` omitted fields have
    the defaults of `farspan.Schedule`.
    """

    strategy: str | None = "grouped"  # base; `auto`: chosen by the planner; null: defaults below
    chunk: int | None = None
    groups: int | tuple[int, ...] | None = None
    boundary_inputs: Tier | None = None
    kv: Tier | None = None
    kv_kept: bool | None = None
    kv_home: Tier | None = None
    attention_save_fraction: float | None = None
    attention_open: bool | None = None
    attention: Tier | None = None
    activation_save_fraction: float | None = None
    activation_save_layers: float | None = None
    activations: Tier | None = None
    layer_checkpoint: bool | None = None
    kv_block: int | None = None
    loss_chunk_size: int | None = None
    mlp_chunk_size: int | None = None
    alltoall_splits: int | None = None
    weights: Tier | None = None
    weight_gradients: Tier | None = None  # must equal `weights`

    def __post_init__(self) -> None:
        self.apply(Schedule())
        weights = self.weights or Tier.DEVICE
        if self.weight_gradients not in (None, weights):
            raise UnsupportedError(
                f"weight_gradients: expected {weights}, as weights, got {self.weight_gradients}: "
                "gradients live with the weights; set both to host, or both to device"
            )
        if self.strategy is not None:
            check_name(self.strategy)
        chosen = [name for name in self.given() if name != "weights"]
        if self.strategy == AUTO and chosen:
            raise UnsupportedError(
                f"{chosen[0]}: strategy auto chooses this for the machine; leave it "
                "out, or name another strategy"
            )

    def given(self) -> dict[str, Any]:
        """Return the Schedule fields that the run file sets."""
        own = "strategy", "weight_gradients"
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return {name: value for name, value in values.items() if value is not None}

    def apply(self, base: Schedule) -> Schedule:
        """Return the Schedule `base` with the fields that the run file sets."""
        return replace(base, **self.given())


@dataclass(frozen=True, slots=True)
class SparseConfig(Sparse):
    """Page-sparse attention, an approximation of dense attention.

    The fields of `farspan.Sparse` say which earlier tokens are visible and how pages are chosen;
    the others name an index and say when to warn. If visible tokens hold a share m of a query's
    attention, its output errs by 1 - m of the difference between the outputs of visible tokens
    alone and of hidden tokens alone: for m = 0.9 by a tenth.
    """

    index: str | None = None  # folder of the adapter for `selector: index`
    # Share of pages that is hidden (FPDT 5.6); null: all pages beyond `budget`.
    sparsity: float | None = None
    warn_below: float = 0.9  # warn if visible tokens hold a smaller share of attention; 0: never

    def __post_init__(self) -> None:
        Sparse.__post_init__(self)
        if self.indexed != (self.index is not None):
            raise UnsupportedError(
                "index: selector index needs the folder of an index; name it in a run file "
                "(sparse.index; `farspan index` makes one), or give another selector"
                if self.index is None
                else f"index: selector {self.selector} uses no index; leave index out, or set "
                "selector to index"
            )
        if self.sparsity is not None and not 0.0 < self.sparsity < 1.0:
            raise UnsupportedError(
                f"sparsity: expected a fraction above 0 and below 1, or null, got {self.sparsity!r}"
                "; for dense attention set `sparse: null`, for no chosen pages `budget: 0`"
            )
        if not 0.0 <= self.warn_below <= 1.0:
            raise UnsupportedError(
                f"warn_below: expected a share of attention from 0 to 1, got {self.warn_below!r}"
            )

    def spec(self) -> Sparse:
        """Return the settings as a Schedule's `Sparse`: without `warn_below` and the index."""
        return Sparse(**{f.name: getattr(self, f.name) for f in fields(Sparse)})

    def over(self, pages: Sparse) -> "SparseConfig":
        """Return this configuration with its settings replaced by those of `pages`. Drops the index
        if `pages` needs none. Raises UnsupportedError if `pages` needs one that is not set here."""
        index = self.index if pages.indexed else None
        try:
            return SparseConfig(**asdict(pages), index=index, warn_below=self.warn_below)
        except UnsupportedError as error:
            raise UnsupportedError(f"sparse.{error}") from error


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW, its learning rate over time, and the limit on the gradient's norm."""

    lr: float = 3e-4  # highest learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's betas
    eps: float = 1e-8  # AdamW's epsilon
    weight_decay: float = 0.1  # weight decay of matrices; norms, biases and embeddings have none
    clip: float | None = 1.0  # largest global norm of the gradient; null: no limit
    warmup: int = 0  # steps over which the learning rate rises linearly
    decay: Decay = Decay.COSINE
    decay_steps: int | None = None  # last steps, in which `wsd` decays; null: a tenth of all steps
    final: float = 0.1  # learning rate at the end of the decay, as a fraction of `lr`
    states: StatesPlace = StatesPlace.AUTO
    disk: str | None = None  # folder for states on disk; null: the run folder
    disk_seconds: float = 600.0  # most seconds per update on the drive, by a test before the run
    # With `weights: host`, update while the next step computes; null: only on one GPU.
    overlap: bool | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "clip", "disk_seconds"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise UnsupportedError(f"{name}: expected a number above 0, got {value!r}")
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise UnsupportedError(f"betas: expected two numbers in [0, 1), got {self.betas!r}")
        if not 0.0 <= self.weight_decay < float("inf"):
            raise UnsupportedError(f"weight_decay: expected 0 or more, got {self.weight_decay!r}")
        if not 0.0 <= self.final <= 1.0:
            raise UnsupportedError(f"final: expected a fraction from 0 to 1, got {self.final!r}")
        _at_least(self.warmup, 0, "warmup")
        if self.decay_steps is not None:
            _at_least(self.decay_steps, 1, "decay_steps")
            if self.decay is not Decay.WSD:
                raise UnsupportedError(
                    f"decay_steps: only decay wsd uses it, got decay {self.decay}; set decay to "
                    "wsd, or leave decay_steps out"
                )

    def falls_over(self, steps: int) -> int:
        """Return the number of steps, at the end of the run, in which the learning rate falls."""
        match self.decay:
            case Decay.CONSTANT:
                return 0
            case Decay.WSD:
                return self.decay_steps or max(1, round(_WSD_DECAY * steps))
            case Decay.COSINE | Decay.LINEAR:
                return steps - self.warmup


_WSD_DECAY = 0.1  # fraction of the steps, as in MiniCPM


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Evaluations of the held-out loss at the full training length."""

    every: int = 100  # steps between held-out losses; 0: only after the last step
    on_start: bool = False  # also compute a held-out loss before step 1
    sequences: int = 8  # most sequences to evaluate, spread over the held-out text
    patience: int | None = None  # evaluations without a lower loss that end the run; null: never
    min_delta: float = 0.0  # smallest decrease of the loss that counts as lower

    def __post_init__(self) -> None:
        _at_least(self.every, 0, "every")
        _at_least(self.sequences, 1, "sequences")
        if self.patience is not None:
            _at_least(self.patience, 1, "patience")
            if self.every == 0:
                raise UnsupportedError(
                    "patience: counts evaluations, and every: 0 evaluates only after the last "
                    "step; set every, or leave patience out"
                )
        if not 0.0 <= self.min_delta < float("inf"):
            raise UnsupportedError(f"min_delta: expected 0 or more, got {self.min_delta!r}")
        if self.min_delta and self.patience is None:
            raise UnsupportedError("min_delta: needs patience; set both, or leave min_delta out")

    def may_stop(self, steps: int) -> bool:
        """Return whether patience can end a run of `steps` before its last step."""
        first = 0 if self.on_start else self.every
        return self.patience is not None and first + self.patience * self.every < steps

    def why_stop(self, held_out: Mapping[int, float]) -> str | None:
        """Return the reason to end a run with these held-out losses by step; None: continue. Counts
        only steps that are multiples of `every`: an extended run was also evaluated at its former
        last step."""
        lowest, at, waited = float("inf"), 0, 0
        for step in sorted(step for step in held_out if self.every and step % self.every == 0):
            waited += 1
            if held_out[step] < lowest - self.min_delta:
                lowest, at, waited = held_out[step], step, 0
        if self.patience is None or waited < self.patience:
            return None
        if lowest == float("inf"):
            return f"no finite held-out loss in {waited} evaluations"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"held-out loss did not fall{by} below {lowest:.4f} (step {at}) in {waited} evaluations"
        )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Interval of checkpoints, and the choice of those that are kept."""

    every: int = 100  # steps between checkpoints; 0: only after the last step and on interruption
    keep: int = 2  # number of latest checkpoints to keep
    best: bool = False  # also keep the one with the lowest held-out loss, and export it to `model/`

    def __post_init__(self) -> None:
        _at_least(self.every, 0, "every")
        _at_least(self.keep, 1, "keep")


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Repository on the Hugging Face hub that receives the model after the run."""

    repo: str  # `user/name` or `organisation/name`
    private: bool = True  # make a new repository private

    def __post_init__(self) -> None:
        if not _REPO.fullmatch(self.repo):
            raise UnsupportedError(f"repo: expected USER/NAME, got {self.repo!r}")


_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class StartConfig:
    """Another run, whose weights are the start of this run."""

    path: str  # folder of a run, a checkpoint or adapters
    states: bool = False  # also continue its optimizer states, random numbers and step count


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All settings of a run. The same values on the same machine give bit-identical results; on a
    GPU only with `kernels.deterministic`."""

    model: ModelConfig
    data: DataConfig
    start: StartConfig | None = None  # null: the model's weights, unchanged
    folder: str = "runs/default"  # results and checkpoints; an existing folder resumes
    steps: int = 1000  # updates of the weights
    context: int = 8192  # tokens per sequence
    batch: int = 1  # sequences that go through the model together
    accumulate: int = 1  # batches per update
    seed: int = 0  # seed of random weights, held-out documents, data order and dropout
    neftune_alpha: float | None = None  # scale of NEFTune's noise, usually 5; null: no noise
    device: str = "auto"  # `auto`, `cpu`, `cuda` or `cuda:1`
    host_memory: str | int | None = None  # main memory for all ranks of a machine; null: all free
    # GPU and main memory that `auto` leaves free: `3GiB`, `5%`; null: 6% of a GPU.
    margin: str | int | None = None
    parallel: Parallel | Auto | None = None  # distribution over ranks; null: one process
    allocator: DeviceAllocator = DeviceAllocator.DEFAULT
    nonfinite: OnNonfinite = OnNonfinite.STOP
    report_to: ReportTo | tuple[ReportTo, ...] | None = None  # trackers for charts; null: none
    loss: LossConfig | None = None  # null: `sft`, the mean loss of trained tokens
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # a strategy's name, or keys
    sparse: SparseConfig | None = None  # null: dense, exact attention
    kernels: Kernels = field(default_factory=Kernels)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    hub: HubConfig | None = None  # null: no upload

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            _at_least(getattr(self, name), 1, name)
        if self.steps > MOST_STEPS:
            raise UnsupportedError(f"steps: expected at most {MOST_STEPS:,}, got {self.steps:,}")
        _at_least(self.context, 2, "context")
        self._check_bounds()
        _at_least(self.seed, 0, "seed")
        if self.neftune_alpha is not None and not 0 <= self.neftune_alpha < float("inf"):
            raise UnsupportedError(f"neftune_alpha: expected at least 0, got {self.neftune_alpha}")
        if self.optimizer.warmup >= self.steps:
            raise UnsupportedError(
                f"optimizer.warmup: expected fewer than steps ({self.steps}), "
                f"got {self.optimizer.warmup}"
            )
        falls = self.optimizer.falls_over(self.steps)
        if self.optimizer.warmup + falls > self.steps:
            raise UnsupportedError(
                f"optimizer.decay_steps: {falls} and a warmup of {self.optimizer.warmup} exceed "
                f"steps ({self.steps}); give fewer"
            )
        self.host_bytes()
        if self.margin is not None:
            read_margin(self.margin)
        self._check_chunk()
        if self.model.lora is not None:
            self._check_lora()
        if self.kernels.products is not None:
            self._check_products()
        self._check_states()
        self._check_held_out()
        if self.loss == LossConfig():
            object.__setattr__(self, "loss", None)
        self._check_loss()

    def _check_loss(self) -> None:
        """Refuse data, references and sparse attention that the loss does not support."""
        loss = self.objective
        if loss.kind is not LossKind.SFT and self.sparse is not None:
            raise UnsupportedError(f"sparse: not supported with loss.kind {loss.kind}; omit one")
        for source, _ in self.data.each():
            if source.format is RecordFormat.TEXT and source.has_fields():
                continue  # the first record tells its format
            if reason := mismatch(loss.kind, [source.format]):
                got = f", got {source.format} of {source.origin()}"
                raise UnsupportedError(reason + got * reason.startswith("data.format"))
        if loss.compared() is Reference.ADAPTERS_OFF and self.model.lora is None:
            raise UnsupportedError(
                "loss.reference: adapters-off needs model.lora; set it, or set loss.reference to "
                "stored"
            )
        start, other = self.start, loss.compared()
        if other is Reference.STORED and any(own.streaming for own, _ in self.data.each()):
            raise UnsupportedError(
                "loss.reference: stored is computed for all answers before the first step, but "
                "data.streaming reads them only later; set loss.reference to frozen or "
                "adapters-off, or leave data.streaming out"
            )
        late = other is Reference.STORED and start is not None and start.states
        if late or (other is Reference.FROZEN and start is not None):
            raise UnsupportedError(
                f"start: loss.reference {other} compares with the weights in model.path, but start "
                "replaces these; give start's weights as model.path, without start (--from)"
            )

    def _check_held_out(self) -> None:
        """Refuse `patience` and `best` if no documents are held out."""
        if any(source.held_out or source.held_out_elsewhere() for source, _ in self.data.each()):
            return
        stops, best = self.evaluation.patience is not None, self.checkpoints.best
        if stops or best:
            key = "evaluation.patience" if stops else "checkpoints.best"
            raise UnsupportedError(
                f"{key}: compares held-out losses, but no documents are held out; set "
                f"data.held_out, or leave {key} out"
            )

    def _check_states(self) -> None:
        states = self.optimizer.states
        on_device = states in (StatesPlace.DEVICE, StatesPlace.EIGHT_BIT)
        if self.schedule.weights is Tier.HOST and on_device:
            raise UnsupportedError(
                "optimizer.states: expected auto, host or disk with schedule.weights: host, got "
                f"{states}: states are updated where weights and gradients are, in main memory; "
                "set optimizer.states to auto, host or disk, or schedule.weights to device"
            )
        eight_bit = states is StatesPlace.EIGHT_BIT
        if eight_bit and self.model.dtype is DType.FLOAT64:
            raise UnsupportedError(
                "optimizer.states: 8bit updates in float32, but model.dtype is float64; set "
                "states to auto, device, host or disk, or dtype to bfloat16 or float32"
            )

    def _check_bounds(self) -> None:
        """Refuse sizes so large that even counting a step's chunks would take too long."""
        if self.context * self.batch > MOST_TOKENS:
            name, factor = ("context", "") if self.batch == 1 else ("batch", f" x {self.batch:,}")
            raise UnsupportedError(
                f"{name}: {self.context:,}{factor} tokens are more than the limit of "
                f"{MOST_TOKENS:,} (1G) for one pass through the model; give fewer"
            )
        if self.accumulate > MOST_BATCHES:
            raise UnsupportedError(
                f"accumulate: expected at most {MOST_BATCHES:,} batches, got {self.accumulate:,}"
            )
        for name in ("chunk", "kv_block", "loss_chunk_size", "mlp_chunk_size"):
            size = getattr(self.schedule, name)
            if size is not None and size * MOST_PIECES < self.context:
                raise UnsupportedError(
                    f"schedule.{name}: {size:,} would cut {self.context:,} tokens into more than "
                    f"{MOST_PIECES:,} pieces; give at least {-(-self.context // MOST_PIECES):,}"
                )

    @property
    def objective(self) -> LossConfig:
        """The run's loss; a run file without one gets the default."""
        return self.loss or LossConfig()

    def tokens_per_step(self) -> int:
        return self.context * self.batch * self.accumulate * replicas(self.parallel)

    def host_bytes(self) -> int | None:
        """Return the bytes of main memory that all ranks of a node may take, or None for all
        available memory. Raises UnsupportedError."""
        return None if self.host_memory is None else read_memory(self.host_memory, "host_memory")

    def timeout(self) -> float:
        """Return the seconds that ranks wait for each other."""
        given = self.parallel if isinstance(self.parallel, Parallel) else Parallel()
        return given.timeout

    def trackers(self) -> tuple[ReportTo, ...]:
        """Return the trackers that receive metrics, without repetitions."""
        given = self.report_to if isinstance(self.report_to, tuple) else (self.report_to,)
        return tuple(dict.fromkeys(kind for kind in given if kind is not None))

    def pages(self) -> Sparse | None:
        """Return the sparse attention that the run's schedules use, or None for dense attention."""
        return None if self.sparse is None else self.sparse.spec()

    def _check_lora(self) -> None:
        """Refuse options whose results with LoRA adapters are not known to be exact."""
        if self.kernels.compile:
            raise UnsupportedError(
                "kernels.compile: not supported with model.lora; set it to false"
            )
        if isinstance(self.parallel, Parallel) and self.parallel.tensor > 1:
            raise UnsupportedError(
                "parallel.tensor: not supported with model.lora; use ulysses instead"
            )

    def _check_products(self) -> None:
        """Refuse options that FP8 products do not support."""
        reason = None
        if self.model.lora is not None:
            reason = "model.lora: its weights are frozen"
        elif isinstance(self.parallel, Parallel) and self.parallel.tensor > 1:
            reason = "parallel.tensor; use ulysses instead"
        elif self.model.dtype.value != "bfloat16":
            reason = f"model.dtype {self.model.dtype.value}; set it to bfloat16"
        if reason is not None:
            raise UnsupportedError(f"kernels.products: fp8 is not supported with {reason}")

    def _check_chunk(self) -> None:
        """Refuse a chunk of the run file that is not a whole number of pages."""
        if self.sparse is None or self.schedule.chunk is None:
            return
        try:
            self.sparse.spec().check_chunk(self.schedule.chunk)
        except UnsupportedError as error:
            raise UnsupportedError(f"schedule.{error} (sparse.page)") from error


TRUST = "model.trust_remote_code"


def load_run(path: Path, settings: Sequence[str] = (), *, trusted: bool = False) -> RunConfig:
    """Return the run that a YAML file describes.

    Args:
        path: A run file, or the config.yaml of a run folder.
        settings: Values such as `optimizer.lr=1e-5`, which replace those of the file.
        trusted: Whether the user allows a config.yaml to run code that comes with a model.

    Raises:
        UnsupportedError: A value is wrong (the message names file, setting and key), or a
            config.yaml, which another person may have written, would run a model's code.
    """
    given = read_file(path)
    if not given:
        raise UnsupportedError(f"{path}: is empty; a run file names at least `model` and `data`")
    run = built({"folder": f"runs/{path.stem}"} | given, settings, str(path))
    said = trusted or any(one.partition("=")[0].strip() in (TRUST, "model") for one in settings)
    if run.model.trust_remote_code and path.name == "config.yaml" and not said:
        raise UnsupportedError(
            f"{path}: {TRUST} runs Python code that comes with the model, and the config.yaml of a "
            f"run folder cannot allow that; read the code, then give --set {TRUST}=true "
            "(--trust-remote-code of farspan evaluate) to run it"
        )
    return run


def built(values: dict[str, Any], settings: Sequence[str], name: str) -> RunConfig:
    try:
        return build(RunConfig, with_settings(values, settings, RunConfig))
    except UnsupportedError as error:
        where = " ".join((name, *(f"--set {setting}" for setting in settings)))
        raise UnsupportedError(f"{where}: {error}") from error


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise UnsupportedError(f"{name}: expected a whole number of at least {least}, got {value}")
