"""From a RunConfig to its context: model, data and optimizer, loaded and laid out over ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from farspan.data.corpus import Corpus, open_corpus, show_sequence
from farspan.data.token_cache import Watch
from farspan.data.tokenizers import BYTES, load_tokenizer
from farspan.distributed.context import broadcast_from_rank0
from farspan.distributed.failure import activity
from farspan.distributed.run_context import DistributedContext
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.hf.describe import describe
from farspan.hf.load import Weights, add_adapters, frozen_digest, stacked_experts
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import reads_text_alone, refuse_context, refuse_dropout, refuse_model
from farspan.plan.grid import group_ranges
from farspan.plan.layout import AXES, Layout
from farspan.plan.model.catalog import refuse_absent
from farspan.plan.strategies import AUTO
from farspan.sparse.train import opening_words
from farspan.spec import ModelSpec, Refused, Schedule
from farspan.train.config import Parallel, RunConfig, StatesPlace, check_ranks, layout_of
from farspan.train.context import (
    Parts,
    RunContext,
    _host_share,
    inspect_model,
    torch_dtype,
)
from farspan.train.optimizer import (
    Placed,
    TrainingOptimizer,
    sharded_parameters,
)
from farspan.train.optimizer_states import load_adamw

PlaceStates = Callable[[Any, torch.device], Placed]

NO_DEVICE = "device: {name!r} is none to train on; give auto, cpu, cuda or cuda:1"
EXPERTS = "none on the experts, whose weights are stacked and no linear modules; they stay frozen"

TEXT = "text alone is trained: what reads images stays as it is and is saved with the rest"


def shard_model(
    run: RunConfig, parts: Parts, model: Any, crew: DistributedContext
) -> ShardedModel | None:
    """Deals a model that rank 0 has loaded, in place; None where all ranks have it whole then."""
    if crew.ranks is None:
        return None
    if not is_sharded(run, crew.layout):
        broadcast_from_rank0(crew.ranks, model)
        return None
    # Stages and tiles follow from the schedule; of the planner's neither does.
    return parallelize(model, parts.schedule_of(run, model), crew.ranks, kernels=run.kernels)


def is_sharded(run: RunConfig, layout: Layout) -> bool:
    """Whether ranks hold parts of the weights, rather than all of them each. Raises Refused."""
    cut = layout.tensor > 1 or layout.pipeline > 1 or layout.fsdp
    if layout.devices() == 1 or not cut:
        return False
    if run.optimizer.states is StatesPlace.EIGHT_BIT:
        raise Refused(
            "optimizer.states: 8bit rounds blocks of 256 neighbours, which depend on how weights "
            "are cut over ranks; use device or host, or parallel.fsdp: false without tensor and "
            "pipeline"
        )
    return True


def resolve(run: RunConfig, ranks: int | None = None) -> RunConfig:
    """The run with its tokenizer spelled out, the model's own, or bytes for random weights; and the
    replicas that so many ranks make, None being a process that nobody launched. Raises Refused."""
    model = run.model
    if model.path is not None:
        refuse_absent("model.path", model.path)
        if model.path.startswith("~"):
            model = replace(model, path=str(Path(model.path).expanduser()))
    data = replace(run.data, tokenizer=run.data.tokenizer or model.path or BYTES)
    return replace(run, model=model, data=data, parallel=check_ranks(run.parallel, ranks))


def make_context(
    run: RunConfig, parts: Parts, watch: Watch, place: PlaceStates, crew: DistributedContext
) -> RunContext:
    """Everything loaded and made but the engine, and the crew laid out.

    `watch(documents, tokens)` is called while text becomes tokens, and `place(model, device)` says
    where the optimizer's states go. Raises Refused.
    """
    if run.optimizer.states is StatesPlace.EIGHT_BIT:
        load_adamw()  # now, rather than when the model is there
    device = crew.device
    memory = parts.choose_allocator(run.allocator, device)
    blank = _blank_model(run, parts, crew)
    tokenizer = load_tokenizer(str(run.data.tokenizer), run.model.trust_remote_code)
    with activity("reading the data"):
        corpus = open_corpus(run.data, tokenizer, context=run.context, seed=run.seed, watch=watch)
    _check_vocabulary(corpus, blank)
    # Now, rather than at the first step that meets a document too long for the model.
    refuse_context(blank.config, min(run.context, corpus.longest))
    model = _load_model(run, parts, crew, blank)

    def looked_at() -> ModelSpec:
        return crew.by_first(lambda: describe(CausalLMStages(model)))

    crew.lay_out(layout_of(run.parallel, crew.count, looked_at))
    crew.refuse_unlike("data", corpus.identity)
    placed = place(model, device)
    elements = _elements(model)
    frozen = crew.by_first(lambda: frozen_digest(model), "reading the frozen weights")
    looked = None
    if run.schedule.strategy == AUTO:
        adapters = run.model.lora.everywhere() if run.model.lora else 0
        looked = crew.by_first(
            lambda: inspect_model(model, run.model.dtype.value, device, adapters, run.kernels)
        )
    dealt = shard_model(run, parts, model, crew)
    pieces = None if dealt is None else sharded_parameters(dealt)
    states = replace(run.optimizer, states=placed.states)
    optimizer = TrainingOptimizer(model, states, pieces, crew.ranks, _host_share(run, crew))
    return RunContext(
        model=model,
        optimizer=optimizer,
        corpus=corpus,
        tokenizer=tokenizer,
        device=device,
        count_trained=parts.count_trained,
        memory=memory,
        placed=placed,
        crew=crew,
        pieces=pieces,
        elements=elements,
        looked=looked,
        frozen=frozen,
    )


def choose_device(name: str) -> torch.device:
    """A device that is there. Raises Refused."""
    try:
        device = torch.device(_best() if name == AUTO else name)
    except RuntimeError as error:
        raise Refused(NO_DEVICE.format(name=name)) from error
    if device.type not in ("cpu", "cuda"):  # mps, meta: devices, but none to train on
        raise Refused(NO_DEVICE.format(name=name))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused("device: no CUDA GPU can be used here; give cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refused(f"device: {name} is beyond the {torch.cuda.device_count()} GPU(s) here")
    return device


def introduce(run: RunConfig, equipment: RunContext) -> str:
    """The lines that open a run."""
    every, trained = equipment.elements
    some = "" if trained == every else f", {trained:,} of them trained,"
    lines = [
        f"{run.folder}: {type(equipment.model).__name__} with {every:,} parameters{some} "
        f"on {equipment.device}{_sharing(equipment.crew)}",
        *equipment.corpus.describe(run.context),
        f"optimizer states: {equipment.placed.describe()}",
    ]
    if run.model.lora is not None and stacked_experts(equipment.model):
        lines.append(f"adapters: {EXPERTS}")
    if not reads_text_alone(equipment.model):
        lines.append(TEXT)
    if run.sparse is not None:
        lines.append(opening_words(run))
    return "\n".join(lines)


def _sharing(crew: DistributedContext) -> str:
    """How many ranks there are and what they share."""
    axes = {axis: getattr(crew.layout, axis) for axis in AXES}
    named = ", ".join(f"{axis} {extent}" for axis, extent in axes.items() if extent > 1)
    return f", {crew.count} ranks: {named}" if named else ""


def _elements(model: Any) -> tuple[int, int]:
    """Of all parameters, and of the trainable ones, while they are whole."""
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in counts), sum(n for n, trained in counts if trained)


def _best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _blank_model(run: RunConfig, parts: Parts, crew: DistributedContext) -> Any:
    """The model without weights, in which what needs none of them is checked before any text is
    read. Raises Refused on all ranks."""

    def look_at() -> None:
        blank = _load(run, parts, torch.device("cpu"), Weights.NONE)
        refuse_model(blank)
        refuse_dropout(blank)
        stages = run.parallel.pipeline if isinstance(run.parallel, Parallel) else 1
        layers = blank.config.get_text_config().num_hidden_layers
        refuse_groups(parts.schedule_of(run, blank), layers, stages)
        found.append(blank)

    found: list[Any] = []
    # What is wrong with it is refused everywhere; the others then find files that it downloaded.
    crew.by_first(look_at, "reading the model's configuration")
    return found[0] if found else _load(run, parts, torch.device("cpu"), Weights.NONE)


def refuse_groups(schedule: Schedule, layers: int, stages: int) -> None:
    """Raises Refused, naming the run file's field, for groups that the model does not have."""
    try:
        group_ranges(schedule, layers, stages)
    except Refused as error:
        where = "schedule" if str(error).startswith("groups") else "parallel"
        raise Refused(f"{where}.{error}") from error


def _load_model(run: RunConfig, parts: Parts, crew: DistributedContext, blank: Any) -> Any:
    """Of several ranks the first loads it, into main memory: weights go to devices when it is known
    which go where. The others have the blank one."""
    torch.manual_seed(run.seed)
    device = crew.device if crew.count == 1 else torch.device("cpu")
    found: list[Any] = []
    # What is wrong with it is refused everywhere.
    crew.by_first(
        lambda: found.append(_load(run, parts, device, Weights.SAVED)), "loading the model"
    )
    return found[0] if found else blank


def _load(run: RunConfig, parts: Parts, device: torch.device, weights: Weights) -> Any:
    model = parts.load_model(
        path=run.model.path,
        config=run.model.config,
        dtype=torch_dtype(run),
        overrides=run.model.overrides,
        seed=run.seed,
        device=device,
        trust_remote_code=run.model.trust_remote_code,
        weights=weights,
    )
    adapt(model, run)
    # Dropout, where a model has any, is then seen and refused rather than silently left out.
    model.train()
    return model


def adapt(model: Any, run: RunConfig) -> None:
    """Gives the model the adapters of the run file, if it has any."""
    lora = run.model.lora
    if lora is not None:
        add_adapters(model, rank=lora.rank, alpha=lora.scale(), targets=lora.targets, seed=run.seed)


def _check_vocabulary(corpus: Corpus, model: Any) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if corpus.largest >= rows:
        raise Refused(
            f"data.tokenizer: it gives ids up to {corpus.largest}, but the model embeds only "
            f"{rows}; use the model's own tokenizer, or set vocab_size to at least "
            f"{corpus.largest + 1} for random weights"
        )


def show_data(run: RunConfig, sequence: int, held_out: bool) -> Iterator[str]:
    """Lines about the data and one sequence of them, counted from 0 as it is trained, or of those
    that are held out. Raises Refused."""
    run = resolve(replace(run, parallel=None))
    tokenizer = load_tokenizer(str(run.data.tokenizer), run.model.trust_remote_code)
    corpus = open_corpus(
        run.data, tokenizer, context=run.context, seed=run.seed, watch=lambda *_: None
    )
    packing = corpus.held_out if held_out else corpus.train
    if packing is None:
        raise Refused("held_out: no documents are; set data.held_out, or data.held_out_path")
    count = packing.sequences_per_epoch()
    if held_out and sequence >= count:
        raise Refused(f"sequence: expected one of the {count} that are held out, below {count}")
    yield from corpus.describe(run.context)
    yield f"\nsequence {sequence}{' held out' if held_out else ''}"
    batch = packing.once(sequence) if held_out else packing.batch([sequence])
    yield from show_sequence(batch, tokenizer)
