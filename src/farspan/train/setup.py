"""Setup of a run: load its model, data and optimizer, and distribute these over ranks."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from farspan.data.config import mismatch
from farspan.data.corpus import Corpus, OpenedSource, open_corpus, show_sequence
from farspan.data.token_cache import TokenStore, Watch, unwatched
from farspan.data.tokenizers import (
    BYTES,
    HowFar,
    HubTokenizer,
    Tokenizer,
    load_tokenizer,
    stop_ids,
)
from farspan.distributed.context import broadcast_from_rank0
from farspan.distributed.failure import activity
from farspan.distributed.run_context import DistributedContext
from farspan.engine.parallelize import ShardedModel, parallelize, sharded_parameters
from farspan.engine.streamed_weights import StreamedWeights
from farspan.formatting import IN_FP8
from farspan.hf.load import (
    Weights,
    add_adapters,
    load_config,
    refuse_unpinned,
    resize_embeddings,
    stacked_experts,
)
from farspan.hf.quantized import elements, format_of, frozen_digest, refuse_whole
from farspan.hf.routers import add_router_loss
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import (
    context_limit,
    describe_positions,
    reads_text_alone,
    refuse_context,
    refuse_dropout,
    refuse_model,
)
from farspan.profile.catalog import hub_name, is_on_hub, refuse_absent
from farspan.program.layout import (
    AXES,
    Layout,
    Parallel,
    check_ranks,
    group_ranges,
    layout_of,
    packed_layout,
    refuse_together,
    streams,
)
from farspan.program.strategies import AUTO
from farspan.spec import LossKind, ModelSpec, Reference, Schedule, Tier, UnsupportedError
from farspan.train.config import ModelConfig, RunConfig, StartConfig, StatesPlace
from farspan.train.context import (
    Components,
    InspectedModel,
    ReferenceModel,
    RunContext,
    host_share,
    inspect_blank,
    torch_dtype,
)
from farspan.train.memory import Placed, resident_bytes
from farspan.train.observer import Observer
from farspan.train.optimizer import TrainingOptimizer, load_adamw
from farspan.train.origin import as_begun, begin, with_base
from farspan.train.planning import inspect_for, place
from farspan.train.sparse import index_of, opening_words

NO_DEVICE = "device: cannot train on {name!r}; give auto, cpu, cuda or cuda:1"
EXPERTS = "none on the experts, whose weights are stacked, not linear modules; they stay frozen"

GLANCE = 1_000, 1 << 20  # documents and tokens that are prepared within seconds
TEXT = "only text is trained: the image encoder stays unchanged and is saved with the model"


def resolve(run: RunConfig, ranks: int | None = None) -> RunConfig:
    """Complete a run: set its tokenizer (default: the model's, or bytes for random weights) and the
    number of replicas that `ranks` ranks form (None: no torchrun). Raises UnsupportedError."""
    model = run.model
    if model.path is not None:
        model = replace(model, path=hub_name("model.path", model.path))
        refuse_absent("model.path", str(model.path))
        refuse_unpinned(str(model.path), model.trust_remote_code, model.revision)
        model, adapters = with_base(model)
        if adapters is not None:
            if run.start not in (None, StartConfig(adapters)):
                raise UnsupportedError(
                    f"start: model.path {adapters} also holds adapters to start from; to keep "
                    f"start, give {model.path} as model.path"
                )
            run = replace(run, start=StartConfig(adapters))
            refuse_absent("model.path", str(model.path))
            refuse_unpinned(str(model.path), model.trust_remote_code, model.revision)
        if str(model.path).startswith("~"):
            model = replace(model, path=str(Path(str(model.path)).expanduser()))
    data = replace(run.data, tokenizer=run.data.tokenizer or model.path or BYTES)
    return replace(run, model=model, data=data, parallel=check_ranks(run.parallel, ranks))


def _warn_of_positions(blank: Any, context: int, observer: Observer) -> None:
    """Warn if the context exceeds the model's positions. Documents that are too long can be refused
    only after the data are read."""
    limit = context_limit(blank)
    if limit is not None and context > limit:
        observer.note(
            f"context: {context:,} exceeds the model's {limit:,} positions: farspan refuses longer "
            "documents once the data are read; scale the model's RoPE, or lower context"
        )


def make_context(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    observer: Observer,
    about: Mapping[str, Any],
) -> RunContext:
    """Make a run's context, without engine, and lay out the ranks. `about` is the about.json of an
    earlier part of the run. Raises UnsupportedError, and Interrupted during tokenization."""
    if run.optimizer.states is StatesPlace.EIGHT_BIT:
        load_adamw()  # fail before loading the model
    memory = components.choose_allocator(run.allocator, world.device)
    tokenizer = cache(partial(load_run_tokenizer, run))
    blank, config = _blank_model(run, components, world, tokenizer)
    _warn_of_positions(blank, run.context, observer)
    index = world.run_on_rank0(partial(index_of, run.sparse, blank), "reading the index")
    corpus = _open_data(run, tokenizer(), observer.preparing)
    _check_data(run, corpus, tokenizer(), blank, observer)
    look = cache(partial(_inspected, run, world.device, blank))
    world.set_layout(_layout_of_run(run, world, blank, lambda: look().model))
    world.refuse_unlike("data", corpus.identity)
    loaded = partial(_load_placed, components=components, world=world, about=about)
    run, placed, model, outside = loaded(run, blank, config, look, observer)
    other = _load_reference(run, components, world, model, corpus)
    corpus.read_ahead(partial(_check_window, run, blank, other))
    counts = [(elements(p), p.requires_grad) for p in model.parameters()]  # before sharding
    frozen = world.run_on_rank0(lambda: frozen_digest(model), "reading the frozen weights")
    inspected = None
    if run.schedule.strategy == AUTO or world.size > 1:
        inspected = world.run_on_rank0(lambda: inspect_for(run, model, world.device))
    reference = None if other is None else _lay_out(run, components, world, other)
    sharded_model = shard_model(run, components, model, world)
    pieces = None if sharded_model is None else sharded_parameters(sharded_model)
    disk = run.optimizer.disk or run.folder
    states = replace(run.optimizer, states=placed.states, disk=disk)
    weights = None
    if streams(run.schedule.apply(Schedule()), world.layout):  # before others refer to the weights
        weights = StreamedWeights(CausalLMStages(model, world.device), world.ranks)
    room = host_share(run, world)
    return RunContext(
        run=run,
        components=components,
        world=world,
        model=model,
        optimizer=TrainingOptimizer(model, states, pieces, world.ranks, room, weights),
        corpus=corpus,
        tokenizer=tokenizer(),
        memory=memory,
        placed=placed,
        pieces=pieces,
        parameters=sum(n for n, _ in counts),
        trainable=sum(n for n, trained in counts if trained),
        inspected=inspected,
        frozen=frozen,
        weights=weights,
        reference=reference,
        index=index,
        outside=outside,
    )


def _layout_of_run(
    run: RunConfig, world: DistributedContext, blank: Any, describe: Callable[[], ModelSpec]
) -> Layout:
    """Return how the run's ranks share the work. Four-bit weights stay whole on each rank."""
    layout = layout_of(run.parallel, world.size, partial(world.run_on_rank0, describe))
    return packed_layout(run.parallel, layout) if _is_packed(run, blank) else layout


def _load_placed(
    run: RunConfig,
    blank: Any,
    config: PretrainedConfig | None,
    look: Callable[[], InspectedModel],
    observer: Observer,
    *,
    components: Components,
    world: DistributedContext,
    about: Mapping[str, Any],
) -> tuple[RunConfig, Placed, Any, int]:
    """Choose the tiers of weights and optimizer states, and load the model into its tier.

    Returns the run with the tier of its weights set, the place of the states, the model, and the
    bytes that the process held before loading the model. Raises UnsupportedError.
    """
    is_packed = _is_packed(run, blank)
    if not is_packed:
        run, placed = place(run, components, world, look, about, observer)
    outside = resident_bytes()
    model = _load_model(run, components, world, blank, config, observer)
    if is_packed:  # packed bytes are known only after loading
        packed, loaded = partial(inspect_for, run, model, world.device), resident_bytes()
        run, placed = place(run, components, world, packed, about, observer)
        outside += resident_bytes() - loaded  # memory that planning keeps, as above
    return run, placed, model, outside


def _is_packed(run: RunConfig, blank: Any) -> bool:
    return run.model.quantize is not None or format_of(blank.config) is not None


def _check_data(
    run: RunConfig, corpus: Corpus, tokenizer: Tokenizer, blank: Any, observer: Observer
) -> None:
    """Raise UnsupportedError if the model does not support the data, before a step would fail."""
    largest = max(corpus.parts, key=lambda part: max(store.largest for store in part.stores))
    _check_vocabulary(run, corpus.largest, largest.opened, blank)
    rows = blank.get_input_embeddings().num_embeddings
    if tokenizer.size() > rows:
        observer.note(
            f"model: embeds {rows:,} ids, but the tokenizer has {tokenizer.size():,}; the data "
            "uses no others, but text at inference may; model.resize_embeddings: true adds rows"
        )
    _check_formats(run, corpus)
    refuse_context(blank, min(run.context, corpus.longest))


def _check_window(
    run: RunConfig, model: Any, reference: Any, opened: OpenedSource, store: TokenStore
) -> None:
    """Raise UnsupportedError, naming the document, if a document in memory does not fit the model
    or `reference` (None: no second model). Of streamed data only a part is in memory."""
    for limited in [model] if reference is None else [model, reference]:
        place = ""
        try:
            place = store.place_of(int((store.tokens == store.largest).argmax()))
            _check_vocabulary(run, store.largest, opened, limited)
            place = store.name(int(np.diff(store.starts).argmax()))
            refuse_context(limited, min(run.context, store.longest()))
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} ({place})") from error


def _check_formats(run: RunConfig, corpus: Corpus) -> None:
    """Refuse answers that the loss does not compare, and other records if it compares answers."""
    formats = {part.opened.config.format for part in corpus.parts}
    if reason := mismatch(run.objective.kind, formats):
        raise UnsupportedError(reason)


def _load_reference(
    run: RunConfig, components: Components, world: DistributedContext, model: Any, corpus: Corpus
) -> Any:
    """Return the reference model of the run's loss, or None if the loss needs none. Rank 0 loads
    the weights; other ranks get a model without weights. Raises UnsupportedError."""
    loss, reference = run.objective, None
    if loss.compared() is Reference.FROZEN:
        reference = copy.deepcopy(model)
    elif loss.teacher is not None:
        reference = _load_teacher(run, components, world, corpus)
    if reference is None:
        return None
    if isinstance(run.parallel, Parallel) and run.parallel.pipeline > 1:
        raise UnsupportedError(
            "parallel.pipeline: stages hold the layers of only one model, but this loss has a "
            "second model; use other axes"
            + ("" if loss.teacher else ", or set loss.reference to stored or adapters-off")
        )
    return reference.requires_grad_(False).eval()


def _load_teacher(
    run: RunConfig, components: Components, world: DistributedContext, corpus: Corpus
) -> Any:
    path = str(Path(str(run.objective.teacher)).expanduser())
    refuse_absent("loss.teacher", path)
    refuse_unpinned(path, False, None, "loss.teacher")
    stays = world.size == 1 and run.schedule.weights is not Tier.HOST
    asked = replace(run, model=ModelConfig(path=path, dtype=run.model.dtype))
    found: list[Any] = []

    def read() -> None:
        device = world.device if stays else torch.device("cpu")
        teacher = _load(asked, components, device, Weights.SAVED)
        rows, most = teacher.get_input_embeddings().num_embeddings, run.objective.top_k
        if corpus.largest >= rows or most > rows:
            raise UnsupportedError(
                f"loss.teacher: {path} embeds {rows:,} ids, but the data has ids up to "
                f"{corpus.largest:,} (loss.top_k {most:,}); give a teacher with the same tokenizer"
            )
        refuse_context(teacher, min(run.context, corpus.longest))
        found.append(teacher)

    world.run_on_rank0(read, "loading the teacher")
    return found[0] if found else _load(asked, components, torch.device("cpu"), Weights.NONE)


def _lay_out(
    run: RunConfig, components: Components, world: DistributedContext, model: Any
) -> ReferenceModel:
    """Distribute the reference model over ranks or into main memory, like the trained model."""
    sharded_model = shard_model(run, components, model, world)
    weights = None
    if streams(run.schedule.apply(Schedule()), world.layout):
        weights = StreamedWeights(CausalLMStages(model, world.device), world.ranks)
    return ReferenceModel(model, sharded_model, weights, run.objective.teacher is not None)


def _open_data(run: RunConfig, tokenizer: Tokenizer, watch: Watch) -> Corpus:
    with activity("reading the data"):
        return open_corpus(run.data, tokenizer, context=run.context, seed=run.seed, watch=watch)


def load_run_tokenizer(run: RunConfig) -> Tokenizer:
    """Return the tokenizer of a run that `resolve` has completed. Raises UnsupportedError."""
    model, name = run.model, str(run.data.tokenizer)
    # The revision is the model's, and does not pin code of another repository.
    trusted = model.trust_remote_code and (name == model.path or not is_on_hub(name))
    revision = model.revision if name == model.path else None
    if name != model.path:
        refuse_unpinned(name, trusted, None, "data.tokenizer")
    tokenizer = load_tokenizer(name, trusted, revision)
    if model.path is not None and isinstance(tokenizer, HubTokenizer):
        tokenizer = replace(tokenizer, others=stop_ids(model.path, model.revision))
    return tokenizer


def embedded_rows(run: RunConfig) -> int:
    """Return how many embedding rows the run needs if it resizes the embeddings, else 0."""
    return load_run_tokenizer(run).size() if run.model.resize_embeddings else 0


def _blank_model(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    tokenizer: Callable[[], Tokenizer],
) -> tuple[Any, PretrainedConfig | None]:
    """Return the run's model without weights, for checks before any text is read, and its
    configuration (None on ranks other than 0). Raises UnsupportedError on all ranks."""

    def blank_of(config: PretrainedConfig | None = None) -> Any:
        rows = tokenizer().size() if run.model.resize_embeddings else 0
        return _load(run, components, torch.device("cpu"), Weights.NONE, config, rows)

    def look_at() -> None:
        config = load_config(**run.model.origin(), dtype=torch_dtype(run))
        blank = blank_of(config)
        refuse_model(blank)
        refuse_dropout(blank)
        stages = run.parallel.pipeline if isinstance(run.parallel, Parallel) else 1
        layers = blank.config.get_text_config().num_hidden_layers
        schedule = components.schedule_of(run, blank)
        refuse_groups(schedule, layers, stages)
        if isinstance(run.parallel, Parallel):
            layout = run.parallel.layout(world.size)
            if _is_packed(run, blank):
                packed_layout(run.parallel, layout)
            refuse_weights(schedule.weights, layout)
        results.append((blank, config))

    results: list[tuple[Any, PretrainedConfig]] = []
    # All ranks raise its errors; later they find the files that rank 0 downloaded.
    world.run_on_rank0(look_at, "reading the model's configuration")
    return results[0] if results else (blank_of(), None)


def _load_model(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    blank: Any,
    config: PretrainedConfig | None,
    observer: Observer,
) -> Any:
    """Load the run's model on rank 0; other ranks return the model without weights. With several
    ranks rank 0 loads it into main memory, because the layout is not known yet. Quantised weights
    are loaded by every rank: what their modules hold besides parameters cannot be sent."""
    torch.manual_seed(run.seed)
    is_packed = _is_packed(run, blank)
    stays = (world.size == 1 or is_packed) and run.schedule.weights is not Tier.HOST
    device = world.device if stays else torch.device("cpu")
    rows = blank.get_input_embeddings().num_embeddings
    loaded: list[Any] = []

    def read() -> None:
        model = _load(run, components, device, Weights.SAVED, config, rows)
        begin(model, run, observer.note)
        loaded.append(model)

    # All ranks raise its errors.
    world.run_on_rank0(read, "loading the model")
    if is_packed and not loaded:
        read()
    return loaded[0] if loaded else blank


def _load(
    run: RunConfig,
    components: Components,
    device: torch.device,
    weights: Weights,
    config: PretrainedConfig | None = None,
    rows: int = 0,
) -> Any:
    """Load the model with its adapters, and with at least `rows` rows of embeddings."""
    model = components.load_model(
        **run.model.origin(),
        dtype=torch_dtype(run),
        seed=run.seed,
        device=device,
        weights=weights,
        nf4=run.model.quantize is not None,
        known=config,
    )
    resize_embeddings(model, rows, run.seed)
    add_router_loss(model, run.objective.router if run.objective.routers else None)
    adapt(model, run)
    # Training mode shows dropout, which is then refused rather than silently left out.
    model.train()
    return model


def adapt(model: Any, run: RunConfig) -> None:
    """Add the run file's adapters to the model, if any. Raises UnsupportedError if they do not fit
    the model, or if a quantised model gets no adapters."""
    lora = run.model.lora
    if lora is None:
        refuse_whole(model.config)
    else:
        add_adapters(
            model,
            rank=lora.rank,
            alpha=lora.scale(),
            targets=lora.targets,
            seed=run.seed,
            dropout=lora.dropout,
        )


def _check_vocabulary(run: RunConfig, largest: int, opened: OpenedSource, model: Any) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if largest < rows:
        return
    if opened.form.any_ids:
        raise UnsupportedError(
            f"data.format: the input_ids of {opened.config.path} go up to {largest}, but "
            f"the model embeds only {rows}; make them with the model's own tokenizer, or set "
            f"vocab_size to at least {largest + 1} for random weights"
        )
    if run.data.tokenizer == run.model.path:
        advice = "for added tokens, set model.resize_embeddings to true"
        if run.model.lora is not None:
            advice += (
                " and leave model.lora out, because adapters leave embeddings frozen; then train "
                "adapters on the model/ of that run"
            )
    else:
        advice = (
            "use the model's own tokenizer, or set vocab_size to at least "
            f"{largest + 1} for random weights"
        )
    raise UnsupportedError(
        f"data.tokenizer: its ids go up to {largest}, but the model embeds only {rows}; {advice}"
    )


def shard_model(
    run: RunConfig, components: Components, model: Any, world: DistributedContext
) -> ShardedModel | None:
    """Distribute a model that rank 0 has loaded, in place. Returns None if ranks keep it whole."""
    if world.ranks is None:
        return None
    if not is_sharded(run, world.layout):
        home = torch.device("cpu") if run.schedule.weights is Tier.HOST else world.device
        broadcast_from_rank0(world.ranks, model, home)
        return None
    # Stages and tiles follow from the schedule, but not from a planned one.
    return parallelize(model, components.schedule_of(run, model), world.ranks, kernels=run.kernels)


def is_sharded(run: RunConfig, layout: Layout) -> bool:
    """Return whether each rank holds only a part of the weights. Raises UnsupportedError."""
    cut = layout.tensor > 1 or layout.pipeline > 1 or layout.fsdp
    if layout.devices() == 1 or not cut:
        return False
    if run.optimizer.states is StatesPlace.EIGHT_BIT:
        raise UnsupportedError(
            "optimizer.states: 8bit rounds blocks of 256 neighbours, which depend on how weights "
            "are sharded; use device or host, or parallel.fsdp: false without tensor and "
            "pipeline"
        )
    return True


def refuse_groups(schedule: Schedule, layers: int, stages: int) -> None:
    """Raise UnsupportedError, naming the field, if groups of layers do not fit the model."""
    try:
        group_ranges(schedule, layers, stages)
    except UnsupportedError as error:
        where = "schedule" if str(error).startswith("groups") else "parallel"
        raise UnsupportedError(f"{where}.{error}") from error


def refuse_weights(weights: Tier, layout: Layout) -> None:
    """Raise UnsupportedError, naming the run file's field, if ranks of this layout cannot keep
    their weights in the tier `weights`."""
    try:
        refuse_together(Schedule(weights=weights), layout)
    except UnsupportedError as error:
        raise UnsupportedError(f"schedule.{error}") from error


def _inspected(run: RunConfig, device: torch.device, blank: Any) -> InspectedModel:
    rank = 0 if run.model.lora is None else run.model.lora.everywhere()
    stages = CausalLMStages(blank, device)
    return inspect_blank(stages, run.model.dtype.value, device, rank, run.kernels)


def choose_device(name: str) -> torch.device:
    """Return the named device, or the best one for `auto`. Raises UnsupportedError."""
    try:
        device = torch.device(_best() if name == AUTO else name)
    except RuntimeError as error:
        raise UnsupportedError(NO_DEVICE.format(name=name)) from error
    if device.type not in ("cpu", "cuda"):  # mps, meta: not supported
        raise UnsupportedError(NO_DEVICE.format(name=name))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device: no CUDA GPU can be used here; give cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            f"device: {name} does not exist; this machine has {torch.cuda.device_count()} "
            "GPU(s); give a lower index"
        )
    return device


def _best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def introduce(ctx: RunContext) -> str:
    run = ctx.run
    every, trained = ctx.parameters, ctx.trainable
    some = "" if trained == every else f", {trained:,} of them trained,"
    lines = [
        f"{run.folder}: {type(ctx.model).__name__} with {every:,} parameters{some} "
        f"on {ctx.device}{_ranks_words(ctx.world)}",
        *ctx.corpus.describe(run.context),
        f"optimizer states: {ctx.placed.describe()}",
    ]
    if ctx.optimizer.drive():
        lines.append(f"states on disk: {ctx.optimizer.drive()}")
    if run.model.lora is not None and stacked_experts(ctx.model):
        lines.append(f"adapters: {EXPERTS}")
    if not reads_text_alone(ctx.model):
        lines.append(TEXT)
    if run.sparse is not None:
        lines.append(opening_words(run))
    if run.kernels.products is not None:
        lines.append(IN_FP8)
    if run.objective.kind is not LossKind.SFT:
        lines.append(f"loss: {run.objective.describe()}")
    patience, every = run.evaluation.patience, run.evaluation.every
    if patience is not None and not run.evaluation.may_stop(run.steps):
        lines.append(
            f"evaluation.patience: has no effect: {patience} evaluations, one every {every} "
            f"steps, do not end before step {run.steps}"
        )
    return "\n".join(lines)


def _ranks_words(world: DistributedContext) -> str:
    """Return words for the number of ranks and how they share a step, or "" for one process."""
    axes = {axis: getattr(world.layout, axis) for axis in AXES}
    named = ", ".join(f"{axis} {extent}" for axis, extent in axes.items() if extent > 1)
    return f", {world.size} ranks: {named}" if named else ""


def show_data(
    run: RunConfig, sequence: int, held_out: bool, watch: Watch = unwatched
) -> Iterator[str]:
    """Yield lines of text about the data and about sequence number `sequence`, counted from 0 in
    training order or, if `held_out`, among the held-out sequences. Raises UnsupportedError."""
    run = as_begun(resolve(replace(run, parallel=None)))
    tokenizer = load_run_tokenizer(run)
    corpus = _open_data(run, tokenizer, watch)
    packing = corpus.held_out if held_out else corpus.train
    if packing is None:
        raise UnsupportedError(
            "held_out: no documents are held out; set data.held_out, or data.held_out_path"
        )
    count = packing.kept.sequences
    if held_out and sequence >= count:
        raise UnsupportedError(
            f"sequence: expected a number below {count}, the number of held-out sequences, "
            f"got {sequence}"
        )
    yield from corpus.describe(run.context)
    config = load_config(**run.model.origin())
    yield from describe_positions(config)
    try:
        refuse_context(config, min(run.context, corpus.longest))
    except UnsupportedError as error:
        yield f"warning: farspan train will refuse this: {error}"
    yield f"\nsequence {sequence}{' held out' if held_out else ''}"
    batch = packing.once(sequence) if held_out else packing.batch([sequence])
    yield from show_sequence(batch, tokenizer)


def glance_at_data(run: RunConfig) -> list[str]:
    """Return the lines of `show_data` for the first sequence, or one line that says why they are
    missing. Reads only local data that are prepared or quick to prepare."""

    def watch(documents: int, tokens: int, read: HowFar) -> None:  # noqa: ARG001
        if documents > GLANCE[0] or tokens > GLANCE[1]:
            raise UnsupportedError("not prepared yet; `farspan data` with this run file shows them")

    sources = [own for own, _ in run.data.each() if own.path is not None]
    if any(own.on_hub() for own in sources):
        return ["data: on the hub; `farspan data` with this run file shows them"]
    try:
        return [line.rstrip() for line in show_data(run, 0, False, watch)] if sources else []
    except UnsupportedError as error:
        return [f"data: {error}"]
