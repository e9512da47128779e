"""Model cards, which say how a model was trained, and uploads to the Hugging Face hub. Cards and
uploads are made from the run folder alone."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub

from farspan.checkpoint.saver import CARD
from farspan.data.config import RecordFormat, SourceConfig, SourceKind
from farspan.distributed.run_context import DistributedContext
from farspan.durable import expect_json, given_json, parsing, read_json, refuse_links, write_whole
from farspan.formatting import IN_FP8, sparse_words, write_tokens
from farspan.hf.merge import ADAPTER_CONFIG, BASE, SOURCE
from farspan.profile.catalog import is_on_hub
from farspan.report.run import ABOUT, METRICS, read_about, read_metrics
from farspan.spec import VERSION, UnsupportedError
from farspan.train.config import HubConfig, RunConfig, StatesPlace, load_run
from farspan.train.memory import WHERE
from farspan.train.run_folder import as_json
from farspan.train.sparse import NOT_DENSE, hides, sparsity_words
from farspan.train.step_runner import TrainingResult
from farspan.train.yaml_config import write_mapping

PUSHED = "hub.json"  # in the run folder: the uploaded model and its repository
EXACT = (
    "dense and exact: loss and gradients are those of plain training on whole sequences, up to "
    "rounding"
)


WEIGHTS = ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"


class RepositoryTaken(Exception):
    """Refusal to replace a repository of the hub; the message says why."""


class PushFailed(RuntimeError):
    """Failed upload of a model to the hub; the message says how to repeat it."""


def refuse_login(hub: HubConfig | None) -> None:
    """Raise UnsupportedError if a run will upload its model and the user is not logged in."""
    if hub is not None and not huggingface_hub.get_token():
        raise UnsupportedError(
            "hub: you are not logged in to the Hugging Face hub; run `hf auth login` or set "
            "HF_TOKEN, or leave hub out and upload the model later with farspan push"
        )


def push(folder: Path, hub: HubConfig) -> str:
    """Upload the `model/` of a run folder, with its card, to a repository.

    Args:
        folder: The folder of a run that has ended.
        hub: The repository, which is created if it does not exist.

    Returns:
        The address of the new commit.

    Raises:
        UnsupportedError: The folder has no model.
        PushFailed: The hub did not accept the model.
    """
    refuse_links(folder)
    model = folder / "model"
    source = given_json(model / SOURCE)
    if not source:
        raise UnsupportedError(
            f"{folder}: has no model/, which a run writes when it ends; give the folder of a run "
            "that has ended, or run farspan train to its end first"
        )
    named = re.fullmatch(r"step-([0-9]{1,18})", str(source.get("checkpoint")))
    if named is None:
        raise UnsupportedError(
            f"{model / SOURCE}: checkpoint: expected a name such as step-00000120, got "
            f"{source.get('checkpoint')!r:.80}"
        )
    if not (model / CARD).exists():
        write_whole(model / CARD, card_of(folder, int(named[1])).encode("utf-8"))
    api = huggingface_hub.HfApi(library_name="farspan", library_version=VERSION)
    try:
        gone = _leftovers(api, model, hub)
        api.create_repo(hub.repo, private=hub.private, exist_ok=True)
        operations: list[Any] = [
            *_files(model),
            *(huggingface_hub.CommitOperationDelete(name) for name in gone),
        ]
        words = f"Model of {source['checkpoint']}, by farspan {VERSION}"
        done = api.create_commit(hub.repo, operations, commit_message=words)
    except RepositoryTaken as error:
        raise PushFailed(
            f"{model} was not uploaded: {hub.repo} {error}; nothing of the run is lost"
        ) from error
    except (Exception, KeyboardInterrupt) as error:  # of the library, the network, or Ctrl+C
        name = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        why = (str(error).strip().splitlines() or [name])[0].rstrip(".")
        raise PushFailed(_failure(folder, hub, why)) from error
    address = str(done.commit_url)
    known = {"repo": hub.repo, "commit": address, SOURCE: source}
    write_whole(folder / PUSHED, json.dumps(known, indent=1).encode("utf-8"))
    return address


def _failure(folder: Path, hub: HubConfig, why: str) -> str:
    public = "" if hub.private else " --public"
    return (
        f"{folder / 'model'} was not uploaded to {hub.repo}: {why}; nothing of the run is lost: "
        f"try again with farspan push {folder} --to {hub.repo}{public}"
    )


def _leftovers(api: Any, model: Path, hub: HubConfig) -> list[str]:
    """Return the weight files in the repository that this model does not replace. Raises
    RepositoryTaken if the repository is public but should be private, or has others' files."""
    if not api.repo_exists(hub.repo):
        return []
    info = api.model_info(hub.repo)
    if hub.private and not info.private:
        raise RepositoryTaken(
            "is already public, but the run asks for a private one; make it private on the hub, "
            "name another, or ask for a public one (hub.private: false, or --public)"
        )
    there = {file.rfilename for file in info.siblings or ()}
    if SOURCE not in there and (others := sorted(there - {CARD, ".gitattributes"})):
        raise RepositoryTaken(
            f"has files that farspan did not upload ({others[0]}), which would be replaced; name "
            "another repository, or remove them there first"
        )
    ours = {path.relative_to(model).as_posix() for path in model.rglob("*")}
    return sorted(name for name in there - ours if name.endswith(WEIGHTS))


def _files(model: Path) -> Iterator[huggingface_hub.CommitOperationAdd]:
    """Yield the files of `model/` to upload, without hidden ones. An adapter configuration that
    names a local folder as its base model is uploaded with the folder's last part only."""
    for path in sorted(model.rglob("*")):
        name = path.relative_to(model)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        content: Path | bytes = path
        if name == Path(ADAPTER_CONFIG):
            values = expect_json(path, **{BASE: str})
            values[BASE] = local_name(values.get(BASE, ""))
            content = json.dumps(values, indent=2).encode("utf-8")
        yield huggingface_hub.CommitOperationAdd(name.as_posix(), content)


class Upload(Thread):
    """Background thread that uploads a model. The process does not wait for it at exit."""

    POLL = 5.0  # seconds to wait at each poll

    def __init__(self, folder: Path, hub: HubConfig) -> None:
        super().__init__(name="upload", daemon=True)
        self._folder, self._hub = folder, hub
        self._found: tuple[str | None, str | None] | None = None

    def run(self) -> None:
        try:
            self._found = push(self._folder, self._hub), None
        except Exception as error:
            self._found = None, str(error) or type(error).__name__

    def poll(self) -> tuple[str | None, str | None] | None:
        """Return None while the upload runs, then (commit's address, None) or (None, error)."""
        try:
            self.join(self.POLL)
        except KeyboardInterrupt:
            return None, _failure(self._folder, self._hub, "interrupted")
        return self._found


def pushed(
    result: TrainingResult, hub: HubConfig | None, world: DistributedContext
) -> TrainingResult:
    """Upload a run's model, unless the hub has it or a signal ended the run. Returns `result`, on
    every rank, with the address or the error: a failed upload does not fail the run."""
    if hub is None or result.signum is not None:
        return result

    def there() -> str | None:
        known = read_json(result.folder / PUSHED) or {}
        same = known.get(SOURCE) == read_json(result.folder / "model" / SOURCE)
        return str(known.get("commit")) if same and known.get("repo") == hub.repo else None

    address = world.run_on_rank0(there)
    if address is not None:
        return replace(result, uploaded=address)
    upload, found = Upload(result.folder, hub), None
    world.run_on_rank0(upload.start)
    while found is None:  # in turns: an upload takes longer than ranks wait for each other
        found = world.run_on_rank0(upload.poll)
    return replace(result, uploaded=found[0], not_uploaded=found[1])


# -- the card ------------------------------------------------------------------------------------

_SEAL = re.compile(r"\n<!-- farspan: ([0-9a-f]{64}) -->\n$")  # hash of all text above


def card_of(folder: Path, step: int) -> str:
    """Return the README of the model of step `step`, or the existing one if a person wrote or
    changed it. Raises UnsupportedError if config.yaml cannot be read."""
    path = folder / "model" / CARD
    before = path.read_text("utf-8", errors="replace") if path.is_file() else None
    if before is not None and not _is_unchanged(before):
        return before
    run, about = load_run(folder / "config.yaml", trusted=True), read_about(folder)
    values = {k: v for k, v in _metadata(run).items() if v}
    with parsing(folder / ABOUT):
        said = list(_card_rows(run, about, folder, step))
    rows = [f"| {name} | {_cell(text)} |" for name, text in said if text]
    base, adapters = base_words(run), run.model.lora is not None
    how = (
        "Load the base model, then the adapters with `peft.PeftModel.from_pretrained`."
        if adapters
        else "Load it with `AutoModelForCausalLM.from_pretrained`."
    )
    what = "Adapters for" if adapters else "A model trained from"
    lines = [
        *("---", write_mapping(values).rstrip("\n"), "---", ""),
        f"# {base}, trained on sequences of {write_tokens(run.context)} tokens",
        *("", f"{what} {base}, trained with farspan {VERSION}. {how}", "", "## Training", ""),
        *("| | |", "|---|---|", *rows, ""),
    ]
    text = "\n".join(lines)
    return f"{text}\n<!-- farspan: {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _is_unchanged(card: str) -> bool:
    seal = _SEAL.search(card)
    return seal is not None and seal[1] == hashlib.sha256(card[: seal.start()].encode()).hexdigest()


def _metadata(run: RunConfig) -> dict[str, Any]:
    path, adapters = run.model.path, run.model.lora is not None
    return {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": path if path and is_on_hub(path) else None,
        "datasets": [str(source.path) for source, _ in run.data.each() if source.on_hub()],
        "tags": [
            *("farspan", "long-context"),
            *["lora"] * adapters,
            *["sparse-attention"] * (run.sparse is not None),
            *["fp8"] * (run.kernels.products is not None),
        ],
    }


def _card_rows(
    run: RunConfig, about: dict[str, Any], folder: Path, step: int
) -> Iterator[tuple[str, str]]:
    """Yield the card's rows (name, value) about the base model, the data, and the training."""
    lora, o = run.model.lora, run.optimizer
    yield "base model", base_words(run) + (f" ({run.model.revision})" if run.model.revision else "")
    if run.model.overrides:
        yield "changes to its configuration", f"`{json.dumps(run.model.overrides)}`"
    trained, total = about.get("trainable"), about.get("parameters")
    what = "all weights"
    if lora is not None:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        what = f"LoRA adapters of rank {lora.rank}, alpha {lora.scale():g}, on {targets}"
        what += f", over weights in {run.model.quantize}" if run.model.quantize else ""
    yield "trained", f"{what}, {trained:,} of {total:,} parameters" if trained and total else what
    for source, weight in run.data.each():
        share = "" if run.data.sources is None else f", weight {weight:g}"
        yield "data", source_words(source) + share
    loss = run.objective
    other = None if loss.teacher is None else local_name(loss.teacher)
    yield "loss", replace(loss, teacher=other).describe()
    yield "context", f"{run.context:,} tokens a sequence"
    yield "steps", f"{step:,}, of {run.tokens_per_step() // run.context:,} sequences each"
    fall = f"then {o.decay}" + (f" over the last {o.decay_steps}" if o.decay_steps else "")
    yield (
        "optimizer",
        f"AdamW, learning rate {o.lr:g}, {o.warmup} warm-up steps, {fall} to {o.final:g} of that, "
        f"betas {o.betas[0]:g} and {o.betas[1]:g}, weight decay {o.weight_decay:g}, gradient norm "
        f"at most {o.clip if o.clip is None else format(o.clip, 'g')}",
    )
    if o.states is StatesPlace.EIGHT_BIT:
        yield "its states", f"**approximate**: {WHERE[o.states]}"
    yield "precision", f"{run.model.dtype} weights and activations"
    if run.kernels.products is not None:
        yield "products", f"**approximate**: {IN_FP8}"
    yield "attention", attention_words(run)
    yield "schedule", f"{about.get('strategy') or 'as written'}, seed {run.seed}"
    with parsing(folder / METRICS):
        yield from list(_measured_rows(folder, step))
    machine = about.get("machine", {})
    layout = {axis: n for axis, n in about.get("layout", {}).items() if axis != "fsdp" and n > 1}
    ranks = ", ".join(f"{axis} {n}" for axis, n in layout.items())
    device = machine.get("gpu") if str(about.get("device")).startswith("cuda") else None
    yield "hardware", (device or machine.get("processor", "")) + (f"; ranks: {ranks}" * bool(ranks))
    versions = {"farspan": VERSION, "python": machine.get("python"), **machine.get("versions", {})}
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number)


def _measured_rows(folder: Path, step: int) -> Iterator[tuple[str, str]]:
    """Yield the card's rows about training up to step `step`: tokens, time and losses."""
    lines = list(read_metrics(folder / METRICS))  # empty if the run has no step
    steps = [line for line in lines if "seconds" in line and line["step"] <= step]
    if steps:
        trained = sum(line["trained_tokens"] for line in steps)
        yield "tokens", f"{steps[-1]['tokens']:,} read, {trained:,} with a loss"
        yield "time", f"{sum(line['seconds'] for line in steps) / 3600:,.2f} hours of steps"
        losses = [line["loss"] for line in steps if "loss" in line]
        yield "loss of the last step", str(as_json(round(losses[-1], 4))) if losses else ""
    held = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    if step in held:
        before = f", {float(held[0]):.4f} before training" if 0 in held else ""
        yield "held-out loss", f"{float(held[step]):.4f}{before}"


def attention_words(run: RunConfig) -> str:
    """Return words for the model card that say whether attention is exact or approximate."""
    if run.sparse is None:
        return EXACT
    hidden = hides(run)
    words = sparse_words(run.sparse.spec(), hides=hidden) + sparsity_words(run)
    return f"**approximate**: {words}; {NOT_DENSE}" if hidden else words


def base_words(run: RunConfig) -> str:
    """Return the name of the model that the run starts from, without local folders."""
    if run.model.path is None:
        kind = (run.model.config or {}).get("model_type")
        return f"a {kind} model of random weights"
    return local_name(run.model.path)


def source_words(source: SourceConfig) -> str:
    """Return words for a data source, without local folders."""
    if source.path is None:
        return "the sources of Python's standard library"
    rows = source.on_hub() or source.source is SourceKind.DATASET
    split = f", split {source.split}" if rows else ""
    kind = source.source if source.source is not SourceKind.AUTO else "dataset" if rows else "files"
    form = "" if source.format is RecordFormat.TEXT else f", format {source.format}"
    return f"{kind} `{local_name(str(source.path))}`{split}{form}"


def local_name(path: str) -> str:
    """Return a hub name unchanged, and only the last part of a local path or glob."""
    if is_on_hub(path):
        return path
    parts = Path(path).expanduser().parts
    return parts[-1] if parts else path


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
