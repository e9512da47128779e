"""From a RunConfig to the model, data and engine that it names."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.data.corpus import Corpus, open_corpus
from farspan.data.store import Watch
from farspan.data.tokenizers import BYTES, Tokenizer, load_tokenizer
from farspan.distributed.failure import activity
from farspan.engine.microbench import describe_machine
from farspan.engine.parallelize import ShardedModel
from farspan.hf.describe import describe
from farspan.hf.load import Weights, add_adapters, frozen_digest, stacked_experts
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import reads_text_alone, refuse_context, refuse_dropout, refuse_model
from farspan.plan.grid import group_ranges
from farspan.plan.layout import AXES
from farspan.plan.model.catalog import refuse_absent
from farspan.plan.strategies import AUTO
from farspan.sparse.train import marks, opening_words
from farspan.spec import ModelSpec, Refused, Schedule
from farspan.train.allocator import DeviceMemory
from farspan.train.choice import Choice
from farspan.train.config import RunConfig, StatesPlace
from farspan.train.crew import Crew
from farspan.train.dealt import deal_model
from farspan.train.dealt_weights import Pieces, pieces_of
from farspan.train.inspection import Looked, look
from farspan.train.layout import Parallel, check_ranks, layout_of
from farspan.train.memory import Expected
from farspan.train.optimizer import Optimizer
from farspan.train.optimizer_8bit import load_adamw
from farspan.train.optimizer_parts import Held
from farspan.train.optimizer_place import DEFAULT, STATES, Placed
from farspan.train.parts import Parts

Place = Callable[[Any, torch.device], Placed]

NO_DEVICE = "device: {name!r} is none to train on; give auto, cpu, cuda or cuda:1"
EXPERTS = "none on the experts, whose weights are stacked and no linear modules; they stay frozen"

TEXT = "text alone is trained: what reads images stays as it is and is saved with the rest"


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a run computes with."""

    model: Any  # a PreTrainedModel
    optimizer: Optimizer
    corpus: Corpus
    tokenizer: Tokenizer
    device: torch.device
    count_trained: Callable[[Tensor, Tensor | None], int]
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    placed: Placed = DEFAULT
    crew: Crew = field(default_factory=lambda: Crew(torch.device("cpu")))
    pieces: Pieces | None = None  # of a model that is dealt over ranks
    elements: tuple[int, int] = (0, 0)  # of all parameters, and of the trainable ones
    looked: Looked | None = None  # where the planner is asked
    frozen: str | None = None  # digest of the weights that are not trained, where some are not

    @property
    def dealt(self) -> ShardedModel | None:
        return None if self.pieces is None else self.pieces.dealt

    def held_bytes(self) -> int:
        """Weights and optimizer states on the device; on a CPU both tiers are that."""
        held = self.optimizer.held()
        return self._weights() + held.device + (held.host if self.device.type == "cpu" else 0)

    def touched_bytes(self) -> Held:
        """What is held and has been written: memory of zeros is taken from the machine then."""
        held = self.optimizer.held()
        if self.device.type == "cpu":
            written = held.device + held.host - held.untouched
            return Held(self._weights() + written, 0, 0)
        return Held(self._weights() + held.device, held.host, 0)

    def host_room(self, run: RunConfig) -> int | None:
        """Bytes of main memory that the run file leaves to a step of this process; None: all that
        there are."""
        share, held = _host_share(run, self.crew), self.touched_bytes()
        if share is None:
            return None
        return share - (held.device if self.device.type == "cpu" else held.host)

    def _weights(self) -> int:
        if self.pieces is not None:
            return self.pieces.held_bytes()
        return sum(parameter.nbytes for parameter in self.model.parameters())


def _host_share(run: RunConfig, crew: Crew) -> int | None:
    """Of what the run file allows the ranks of a node, one rank's."""
    limit = run.host_bytes()
    return None if limit is None else limit // crew.near


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


def equip(run: RunConfig, parts: Parts, watch: Watch, place: Place, crew: Crew) -> Equipment:
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
            lambda: look(model, run.model.dtype.value, device, adapters, run.kernels)
        )
    dealt = deal_model(run, parts, model, crew)
    pieces = None if dealt is None else pieces_of(dealt)
    states = replace(run.optimizer, states=placed.states)
    optimizer = Optimizer(model, states, pieces, crew.ranks, _host_share(run, crew))
    return Equipment(
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


def torch_dtype(run: RunConfig) -> torch.dtype:
    """Of its parameters and activations."""
    found: torch.dtype = getattr(torch, run.model.dtype.value)
    return found


def introduce(run: RunConfig, equipment: Equipment) -> str:
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


def _sharing(crew: Crew) -> str:
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


def _blank_model(run: RunConfig, parts: Parts, crew: Crew) -> Any:
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


def _load_model(run: RunConfig, parts: Parts, crew: Crew, blank: Any) -> Any:
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


def about(
    run: RunConfig, equipment: Equipment, choice: Choice, expected: Expected
) -> dict[str, Any]:
    """The content of about.json."""
    model, packing = equipment.model, equipment.corpus.train
    return {
        **marks(run),
        **({} if run.sparse is None else {"sparse": asdict(run.sparse)}),
        "model": type(model).__name__,
        "parameters": equipment.elements[0],
        "trainable": equipment.elements[1],
        "strategy": choice.strategy,
        "schedule": asdict(choice.schedule),
        STATES: equipment.placed.states.value,
        "memory": dict(expected.parts),
        "data": equipment.corpus.identity,
        "tokens_per_epoch": packing.kept.tokens,
        "sequences_per_epoch": packing.sequences_per_epoch(),
        "device": str(equipment.device),
        **({} if equipment.crew.place is None else {"layout": asdict(equipment.crew.layout)}),
        "machine": describe_machine(),
    }
