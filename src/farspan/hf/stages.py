"""Run an unmodified Hugging Face causal LM stage by stage: embed, layers, logits.

A *shell* is a shallow copy of the model's modules in which the list of decoder layers is replaced;
parameters and every other submodule are shared with the model, which does not change. Running a
shell runs the family's own code for everything around the layers: embeddings and their scaling,
position embeddings, the arguments of each layer, the final norm, the head, logit scaling and
soft-capping. So no family needs code here.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from farspan.hf.attention_interface import (
    FirstPositions,
    WholeValues,
    attends_twice,
    position_scale,
)
from farspan.hf.carried import (
    EMBEDDING,
    INPUT,
    SHARED,
    Carried,
    LayerCarry,
    carries_of,
    named_arguments,
)
from farspan.hf.edits import layer_signature
from farspan.hf.swap import Module, StandIn, shell_of
from farspan.hf.unsupported import (
    chooses_by_length,
    first_position,
    refuse_adapters,
    refuse_cross_attention,
    settled,
)
from farspan.spec import UnsupportedError

Found = TypeVar("Found")


class _AllRecorded(Exception):
    """Exception that stops a forward when every layer's arguments have been recorded."""


class _Unpacked(UnsupportedError):
    """Error about a model that passes a layer something other than the previous hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            f"model: {type(model).__name__} passes a layer something other than the hidden state "
            "of the layer before (a part of it, or several of them); expected layers that pass "
            "on one hidden state"
        )


@dataclass(slots=True)
class LayerCall:
    """Arguments with which the model's own forward calls one layer."""

    arguments: tuple[Any, ...]  # positional, after the hidden state
    keywords: dict[str, Any]
    caches: frozenset[str] = frozenset()  # keywords that pass a cache to the layer
    carry: LayerCarry | None = None  # None: the layer is passed one hidden state

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "LayerCall":
        def changed(leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        arguments, keywords = tree_map(changed, (self.arguments, self.keywords))
        return replace(self, arguments=arguments, keywords=keywords)

    def kind(self) -> tuple[Any, ...]:
        """Return a key that is equal for calls that differ only in the values of their tensors."""
        leaves, form = tree_flatten((self.arguments, self.keywords))
        return str(form), *(_kind(leaf) for leaf in leaves)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


@dataclass(slots=True)
class _Record:
    """Calls of layers, as stand-ins record them during one forward of the model."""

    model: nn.Module
    in_tuples: bool  # return (hidden, None) from layers
    named: bool  # record arguments by name
    layers: int  # calls to record: those of the first layers
    hidden: Tensor | None = None  # the first layer's input
    calls: list[LayerCall] = field(default_factory=list)
    looked_up: tuple[Tensor, int] | None = None  # the embedding's output, and its version

    def is_lookup(self) -> bool:
        """Return whether the first layer's input is what the embedding returned, unchanged."""
        if self.looked_up is None:
            return False
        out, version = self.looked_up
        return self.hidden is out and out._version == version


@dataclass(slots=True)
class _Tape:
    """Place where the recorders of a decoder's shell find the present record."""

    record: _Record | None = None


class _Recorder(StandIn):
    """Stand-in for a layer that records its call."""

    def __init__(self, layer: nn.Module, tape: _Tape):
        super().__init__(layer)
        self._tape = tape

    def forward(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        record = self._tape.record
        assert record is not None
        if record.hidden is None:
            record.hidden = hidden
        elif hidden.shape != record.hidden.shape:
            raise _Unpacked(record.model)
        if record.named:
            arguments, keywords = (), named_arguments(self._module, arguments) | keywords
        record.calls.append(LayerCall(arguments, keywords))
        if len(record.calls) == record.layers:
            raise _AllRecorded
        return (hidden, None) if record.in_tuples else hidden


class _StandIns(nn.ModuleList):
    """List of stand-ins for layers. Models slice theirs: in each pass, 20 times as fast as torch's
    lists, which make a module of a slice."""

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


class _Lookup(StandIn):
    """Stand-in for the embedding that leaves its output in the record."""

    def __init__(self, embedding: nn.Module, tape: _Tape):
        super().__init__(embedding)
        self._tape = tape

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        out, record = self._module(*arguments, **keywords), self._tape.record
        if record is not None and isinstance(out, Tensor) and not out.is_inference():
            record.looked_up = out, out._version
        return out


class _Inject(StandIn):
    """Stand-in for all layers that returns a given hidden state, on which the head then runs."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.hidden: Any = None

    def forward(self, _: Tensor, *__: Any, **___: Any) -> Any:
        return self.hidden


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile or single-process data parallelism. Raises
    UnsupportedError for a wrapper whose hooks average gradients over ranks, since a step does not
    call hooks."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            ranks = torch.distributed.get_world_size(model.process_group)
            if ranks > 1:
                raise UnsupportedError(
                    f"model: DistributedDataParallel would average gradients over {ranks} ranks, "
                    "by hooks that a step does not call; give the step the bare model (.module) "
                    "and ranks=farspan.ParallelContext, or use `torchrun -m farspan train`"
                )
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


# Families that read padding for a token that stands for an image, a video or a sound.
READ_AS_PADDING = ("gemma4", "gemma4_unified")
STANDS_FOR_OTHER = ("image_token_id", "video_token_id", "audio_token_id")


def tokens_as_read(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return the token ids that the model embeds: some families replace ids, even in plain text."""
    config = model.config
    if config.model_type not in READ_AS_PADDING:
        return input_ids
    padding = config.get_text_config().pad_token_id
    for name in STANDS_FOR_OTHER:
        other = getattr(config, name, None)
        if other is not None:
            input_ids = input_ids.masked_fill(input_ids == other, padding)
    return input_ids


LOOKUP = ("lookup",)  # of what a step keeps: whether the first layer's input is a row of a table


class CausalLMStages:
    """A causal LM in three stages that run separately: embedding, layers, head."""

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        """Take a model apart. `device` runs the stages; parameters may lie elsewhere."""
        model = unwrapped(model)
        unwrap = getattr(model, "get_base_model", None)  # of a PEFT model
        inner = unwrap() if callable(unwrap) else model
        if not isinstance(inner, PreTrainedModel):
            raise UnsupportedError(
                f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; load "
                "it with AutoModelForCausalLM"
            )
        own = {id(p) for p in inner.parameters()}
        strangers = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in own]
        if strangers:
            raise UnsupportedError(
                f"model: {strangers[0]} is trained outside of the causal LM (prompt or prefix "
                "tuning), where no chunk would use it; use adapters inside the layers, such as "
                "LoRA"
            )
        refuse_adapters(model)
        self.model = inner
        self._device = device
        self.autocast: torch.dtype | None = None  # of torch.autocast in a step; None: without
        self._in_tuples = False  # whether layers return their hidden state in a tuple
        self._caches: list[frozenset[str]] | None = None  # of each layer; None: not found yet
        self.decoder, self._layers_name = _decoder_of(inner)
        self.layers = cast(nn.ModuleList, self.decoder.get_submodule(self._layers_name))
        self._path = _path_to(inner, self.decoder)
        self.carries = carries_of(self.decoder, self.layers)
        self.first_position = first_position(inner)
        self.scales = [position_scale(layer) for layer in self.layers]
        self.twice = [attends_twice(layer) for layer in self.layers]
        self.by_length = chooses_by_length(inner.config)
        self._settled: dict[str, nn.Module] = {}  # replace the decoder's children in shells
        self.running = list(self.layers)  # the layers, or their shells
        self._shells: dict[nn.Module, nn.Module] = {}  # of modules around the layers
        self._kept: dict[Any, Any] | None = None  # made in a step; None: no step keeps them

    def run_in(self, shell: Callable[[nn.Module], nn.Module]) -> None:
        """From now on, run copies of the layers, and of the modules between layers and logits.
        `shell` returns a copy of a module that shares its weights and may have another forward."""
        self.run_layers_in(shell)
        path = [self.model.get_submodule(".".join(self._path[:i])) for i in range(len(self._path))]
        holders = self._holders()
        inside = {*path, self.decoder, self.layers, *holders.values()}
        around = *path, self.decoder, *holders.values()
        beside = [child for module in around for child in module.children()]
        self._shells = {child: shell(child) for child in beside if child not in inside}

    def run_layers_in(self, shell: Callable[[nn.Module], nn.Module]) -> None:
        """Run copies of the layers, made by `shell`, from now on; see `run_in`."""
        self.running = [shell(layer) for layer in self.layers]

    def settle(self, longest: int) -> None:
        """Set the longest position of the next sequences, by which longrope picks frequencies."""
        if self.by_length:
            self._settled = settled(self.decoder, longest, self.device)

    def in_place(self) -> "CausalLMStages":
        """Return the same stages, which run on the parameters' own device."""
        twin = copy.copy(self)
        twin._device = twin._kept = None
        return twin

    @contextmanager
    def kept_shells(self) -> Iterator[None]:
        """Make shells of modules around the layers only once inside the context, as in a step. The
        model may be edited between steps, but not there."""
        before, self._kept = self._kept, {}
        try:
            yield
        finally:
            self._kept = before

    def _once(self, key: tuple[Any, ...], make: Callable[[], Found]) -> Found:
        """Return the result of `make` for this key, called once per step."""
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        found: Found = self._kept[key]
        return found

    @property
    def device(self) -> torch.device:
        return self._device or next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context in which a step calls the model's modules: torch.autocast, if the step
        has it. Weights are cast anew at each call: a cache of them would outlive a cell's graph."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    @property
    def vocab(self) -> int:
        head = self.model.get_output_embeddings()
        rows = [self._embedding, *([] if head is None else [cast(Tensor, head.weight)])]
        return min(table.shape[0] for table in rows)

    @property
    def hidden(self) -> int:
        """Number of elements of a token's hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def width(self) -> int:
        """Number of elements of a token that layers pass on: most pass on the hidden state alone,
        others a packed tensor (`hf.carried`), which then is what `hidden` arguments hold."""
        return self.carries[0].layout.width if self.carries else self.hidden

    @property
    def _embedding(self) -> Tensor:
        return cast(Tensor, self.model.get_input_embeddings().weight)

    def outer_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters outside the layers: embeddings, final norm, head."""
        inside = {id(p) for p in self.layers.parameters()}
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in inside]

    def tied_across(self) -> str | None:
        """Return the name of a parameter that a layer shares with a module outside, or None."""
        inside = {id(p) for p in self.layers.parameters()}
        stack = ".".join([*self._path, self._layers_name, ""])
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if id(p) in inside and not name.startswith(stack):
                return name
        return None

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """Return layer 0's input, [batch, tokens, hidden], and each layer's arguments."""
        input_ids = tokens_as_read(self.model, input_ids)
        record = self._record(input_ids=input_ids, position_ids=position_ids)
        assert record.hidden is not None
        self._once(LOOKUP, record.is_lookup)
        if not self.carries:
            return record.hidden, record.calls
        layout = self.carries[0].layout
        inputs = [c.keywords.pop(INPUT) for c in record.calls if layout.trains_inputs]
        return layout.packed(record.hidden, inputs), record.calls

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return layer 0's input alone, [batch, tokens, hidden]."""
        if self.carries:
            return self.embed(input_ids, position_ids)[0]
        input_ids = tokens_as_read(self.model, input_ids)
        # The rest takes 0.2 ms. Without gradients its bytes are planned: they may be the most.
        if torch.is_grad_enabled() and self._once(LOOKUP, lambda: False):
            with self.computing():
                return cast(Tensor, self.model.get_input_embeddings()(input_ids))
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        hidden = self._recorded_at(inputs, layers=1).hidden
        assert hidden is not None
        return hidden

    def calls(self, batch: int, position_ids: Tensor) -> list[LayerCall]:
        """Return each layer's arguments at these positions, without running the embedding. Inputs
        that layers get of the tokens themselves are all ones."""
        return self._record(**self._without_lookup(batch, position_ids)).calls

    def calls_for(self, input_ids: Tensor, position_ids: Tensor) -> list[LayerCall]:
        """Return each layer's arguments for these tokens."""
        if self.carries and self.carries[0].layout.again > 0:  # calls depend on tokens, too
            return self.embed(input_ids, position_ids)[1]
        return self.calls(len(input_ids), position_ids)

    def _without_lookup(self, batch: int, position_ids: Tensor) -> dict[str, Tensor]:
        # Rotary tables take only their dtype and device from the embeddings, so one expanded number
        # replaces those.
        width = 1 if self.carries else self._embedding.shape[-1]
        blank = torch.zeros((), dtype=self.dtype, device=self.device)
        shape = (batch, position_ids.shape[1], width)
        return {"inputs_embeds": blank.expand(shape), "position_ids": position_ids}

    def _recorded_at(self, inputs: dict[str, Tensor], layers: int) -> _Record:
        if self.first_position:  # else the sum would be a copy of 8 bytes a token
            inputs["position_ids"] = inputs["position_ids"] + self.first_position
        with self.computing():
            return self._alone_or_in_tuples(lambda tuples: self._recorded(tuples, inputs, layers))

    def _record(self, **inputs: Tensor) -> _Record:
        record = self._recorded_at(inputs, len(self.layers))
        assert record.hidden is not None
        for call, carry in zip(record.calls, self.carries, strict=bool(self.carries)):
            call.carry = carry
            call.keywords.pop(SHARED, None)
            call.keywords.pop(EMBEDDING, None)
        if self._caches is None:
            self._caches = self._given_caches(record.calls)
        for index, (call, names) in enumerate(zip(record.calls, self._caches, strict=True)):
            call.caches = names
            if (scale := self.scales[index]) is not None:
                first = FirstPositions(inputs["position_ids"], *scale)
                call.keywords |= dict.fromkeys(names, first)
            if self.twice[index]:
                call.keywords |= dict.fromkeys(names, WholeValues())
        return record

    def _given_caches(self, calls: list[LayerCall]) -> list[frozenset[str]]:
        """Return, for each layer, the names of the arguments that pass a cache, which vary by
        family: they are None with use_cache=False and objects with True."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        inputs = self._without_lookup(1, one)
        try:
            cached = self._recorded(self._in_tuples, inputs, len(calls), use_cache=True).calls
        except Exception:  # it can make none; its layers are then seen to pass no state on
            return [frozenset()] * len(calls)
        plain = Tensor | bool | int | float | None
        return [
            frozenset(
                name
                for name, value in given.keywords.items()
                if not isinstance(value, plain) and call.keywords.get(name, value) is None
            )
            for call, given in zip(calls, cached, strict=True)
        ]

    def _recorded(
        self, in_tuples: bool, inputs: dict[str, Tensor], layers: int, use_cache: bool = False
    ) -> _Record:
        blank = bool(self.carries) and "inputs_embeds" in inputs
        shell, tape = self._once(("record", blank), lambda: self._recording(blank=blank))
        record = tape.record = _Record(self.model, in_tuples, bool(self.carries), layers)
        try:
            shell(use_cache=use_cache, **inputs)
        except _AllRecorded:
            return record
        except RuntimeError as error:
            if "written-to tensor" in str(error):  # CTRL: embeddings are one expanded number
                raise UnsupportedError(
                    f"model: {type(self.model).__name__} changes its input embeddings in place; "
                    "expected a decoder that leaves these unchanged"
                ) from error
            raise
        finally:
            tape.record = None  # its tensors are the caller's
        raise UnsupportedError(
            f"model: {type(self.model).__name__} does not call every layer of its decoder in turn"
        )

    def _recording(self, *, blank: bool) -> tuple[nn.Module, _Tape]:
        """Return a shell of the decoder whose layers record their calls on a tape. If `blank`, it
        makes no inputs of layers from its input embeddings."""
        tape, modules = _Tape(), self._settled
        recorders = _StandIns([_Recorder(layer, tape) for layer in self.layers])
        # GPT-2's asks the device about the ends of each chunk, which makes the CPU wait.
        attributes: dict[str, Any] = {"warn_if_padding_and_no_attention_mask": lambda *_: None}
        if self.model.config.model_type == "recurrent_gemma":  # stores states in the user's layers
            attributes["_setup_cache"] = lambda *_: None
        if blank:
            layout = self.carries[0].layout
            modules, attributes = modules | layout.blank_modules(), attributes | layout.blank()
        table = self.model.get_input_embeddings()
        lookup = {n: _Lookup(x, tape) for n, x in self.decoder.named_children() if x is table}
        modules = self._with_layers(recorders, shell_of) | lookup | modules
        return shell_of(self.decoder, modules, attributes=attributes), tape

    def _alone_or_in_tuples(self, run: Callable[[bool], Found]) -> Found:
        """Return the result of `run(in_tuples)`, which puts stand-ins in the layers' places. They
        return the hidden state alone, as most layers do, or in a tuple, as Bamba's. Tries the
        first, then tuples; if only tuples work, later calls try no other."""
        if self._in_tuples:
            return run(True)
        try:
            return run(False)
        except (IndexError, ValueError) as alone:  # a local copy would keep tensors in a cycle
            try:
                found = run(True)
            except Exception:
                raise alone from None
        self._in_tuples = True
        return found

    def kinds(self) -> list[tuple[Any, ...]]:
        """Return a key for each layer, equal for layers that compute alike and are called alike."""
        calls = self.calls(1, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        made = (layer_signature(layer, index) for index, layer in enumerate(self.layers))
        return [(*kind, *call.kind()) for kind, call in zip(made, calls, strict=True)]

    def for_each_kind(self, make: Callable[[int], Found]) -> list[Found]:
        """Return the result of `make` for each layer, called for the first layer of each kind."""
        known: dict[Any, Found] = {}
        kinds = self.kinds()
        for index, kind in enumerate(kinds):
            if kind not in known:
                known[kind] = make(index)
        return [known[kind] for kind in kinds]

    def run_layer(self, index: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Run one decoder layer on a chunk, [batch, tokens, hidden], and return its output."""
        return run_layer(self.running[index], hidden, call)

    @property
    def classifies(self) -> bool:
        """True if the head reads whole sequences, as that of a reward model does."""
        return isinstance(self.model, GenericForSequenceClassification)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [batch, tokens, vocab] for the top layer's output, [batch, tokens,
        hidden]. Raises UnsupportedError if the head reads whole sequences."""
        if self.classifies:
            raise UnsupportedError(
                f"model: {type(self.model).__name__} has a head for whole sequences, which gives "
                "no logits for each token; give Step(..., head=lambda hidden, _: "
                "model.score(hidden)) and call Step.values"
            )
        with self.computing():
            return self._alone_or_in_tuples(lambda tuples: self._above(tuples, hidden, head=True))

    def read(self, hidden: Tensor) -> Tensor:
        """Return the logits, or a whole-sequence head's input, for the top layer's output."""
        return self.final(hidden) if self.classifies else self.logits(hidden)

    def final(self, hidden: Tensor) -> Tensor:
        """Return the head's input, [batch, tokens, hidden]: the normed output of the layers."""
        with self.computing():
            return self._alone_or_in_tuples(lambda tuples: self._above(tuples, hidden, head=False))

    def _above(self, in_tuples: bool, hidden: Tensor, *, head: bool) -> Tensor:
        tokens = hidden.shape[:2]
        layout = self.carries[0].layout if self.carries else None
        top = hidden if layout is None else layout.hidden_states(hidden)
        root, inject = self._once(("above", head), lambda: self._injected(layout, head=head))
        blank = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        width = self._embedding.shape[-1]
        position_ids = torch.zeros(1, hidden.shape[1], dtype=torch.long, device=hidden.device)
        inject.hidden = (top, None) if in_tuples else top
        try:
            out = root(
                inputs_embeds=blank.expand(*tokens, width),
                position_ids=position_ids,
                use_cache=False,
            )
        finally:
            inject.hidden = None
        found: Tensor = out.logits if head else out.last_hidden_state
        if found.shape[:-1] != tokens:
            raise _Unpacked(self.model)
        return found

    def _injected(self, layout: Carried | None, *, head: bool) -> tuple[nn.Module, _Inject]:
        """Return a shell of the model, or of its decoder alone, and the stand-in for its layers."""
        inject = _Inject(self.layers[0])
        layers = _StandIns([inject])
        modules = self._with_layers(layers, self._shell) | self._settled
        decoder = self._shell(self.decoder, modules)
        if layout is not None:
            blanks = layout.blank_modules()
            decoder = shell_of(decoder, blanks, attributes=layout.blank())
        return self._around(decoder, self._shell) if head else decoder, inject

    def in_copies(self) -> PreTrainedModel | None:
        """Return a copy of the model in which modules around the layers run their class's forward,
        not one set on the instance; None if no such module has one."""
        around = [
            self.model.get_submodule(".".join(self._path[:i])) for i in range(len(self._path))
        ]
        if not any("forward" in module.__dict__ for module in (*around, self.decoder)):
            return None
        return self._around(shell_of(self.decoder), shell_of)

    def _around(
        self,
        inner: nn.Module,
        shell: Callable[[nn.Module, dict[str, nn.Module]], nn.Module],
    ) -> PreTrainedModel:
        """Return a copy of the model, made by `shell`, in which `inner` is the decoder."""
        for depth in reversed(range(len(self._path))):
            holder = self.model.get_submodule(".".join(self._path[:depth]))
            inner = shell(holder, {self._path[depth]: inner})
        return cast(PreTrainedModel, inner)

    def _holders(self) -> dict[str, nn.Module]:
        """Return the modules between the decoder and its list of layers by path, such as BERT's
        `encoder`."""
        parts = self._layers_name.split(".")
        paths = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        return {path: self.decoder.get_submodule(path) for path in paths}

    def _with_layers(
        self, layers: nn.ModuleList, shell: Callable[[Any, dict[str, nn.Module]], nn.Module]
    ) -> dict[str, nn.Module]:
        """Return {name: module} of the decoder's child that holds the layers, with `layers` in
        their place. `shell` copies the modules between decoder and layers."""
        inner: nn.Module = layers
        name = self._layers_name.rpartition(".")[2]
        for path, holder in reversed(self._holders().items()):
            inner, name = shell(holder, {name: inner}), path.rpartition(".")[2]
        return {name: inner}

    def _shell(self, module: Module, inside: dict[str, nn.Module]) -> Module:
        """Copy a module around the layers with other children: those in `inside`, by name, and for
        the rest the copies of `run_in`."""
        children = module.named_children()
        return shell_of(module, {n: self._shells.get(x, x) for n, x in children} | inside)


def run_layer(layer: nn.Module, hidden: Tensor, call: LayerCall) -> Tensor:
    """Call a decoder layer, or its copy, and return its output [batch, tokens, hidden]."""
    if call.carry is not None:
        return call.carry.run(layer, hidden, call.keywords)
    out = layer(hidden, *call.arguments, **call.keywords)
    return out[0] if isinstance(out, tuple) else out


def _decoder_of(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return the module that holds the decoder layers, and the name of their list in it. A family's
    get_decoder may return another module: ModernBertDecoder's is its head."""
    named = model.get_decoder()
    inside = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    stacks = [named] if named in inside and len(_lists(named)) == 1 else inside
    found = [(stack, name) for stack in stacks for name in _lists(stack)]
    if len(found) == 1:
        return found[0]
    name = type(model).__name__
    if getattr(model.config, "is_decoder", None) is False:
        raise UnsupportedError(
            f"model: {name} attends to later tokens (is_decoder is false in its configuration); "
            "only a causal model can be processed in chunks"
        )
    last = inside[-1]
    places = ((path, _lists(module, last.config)) for path, module in last.named_modules())
    nested = [f"{path}.{inner}" for path, lists in places for inner in lists]
    if not found and len(nested) == 1:
        return last, nested[0]
    refuse_cross_attention(model)
    lists = ", ".join(f"{type(stack).__name__}.{inner}" for stack, inner in found) or "none"
    raise UnsupportedError(
        f"model: {name} has no single ModuleList of num_hidden_layers decoder layers that run in "
        f"turn (found: {lists})"
    )


def _lists(stack: nn.Module, config: Any = None) -> list[str]:
    """Return the names of a module's lists with num_hidden_layers entries."""
    count = getattr(config or stack.config, "num_hidden_layers", None)
    return [
        name
        for name, child in stack.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]


def _path_to(root: nn.Module, target: nn.Module) -> list[str]:
    for name, module in root.named_modules():
        if module is target and name:
            return name.split(".")
    raise UnsupportedError(
        f"model: the decoder of {type(root).__name__} is not one of its submodules"
    )
