"""An index of keys: learned projections of queries and keys to a few dims, by which pages are
compared instead of the model's own queries and keys (selector `index`; after MiniMax Sparse
Attention and DeepSeek's indexer).

A layer's index maps the inputs of attention (after rotary embedding), each head of queries and of
keys, linearly to d dims. The score of a page for a query is the largest of its tokens' scale * (q
Q) . (k K), and the page votes as in `sparse.pages.vote`. The model does not change: the maps are an
adapter, saved in a folder of their own.

They learn the mass that the model's own attention gives to the chosen pages: the loss is the
Kullback-Leibler divergence of a page's weights by the index from the mass that a head gives it,
both over those pages, of some queries a cell. Queries and keys are constants in it, so that the
model's gradients are the same bits, whether an index learns during a step or not.

Legend: B batch, T tokens, H query heads, Hk key-value heads, r = H / Hk, D head dim, d dims of the
index.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from farspan.attention.backends import reference
from farspan.durable import read_json, write_bytes, writing
from farspan.engine.loss import make_inputs
from farspan.hf.attention_interface import answering, attended, routed
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import refuse_context
from farspan.program.layout import Rank
from farspan.sparse.attend import SparseCall
from farspan.sparse.pages import Candidates, Selector
from farspan.spec import LayerSpec, UnsupportedError

CONFIG, TENSORS = "index_config.json", "index.safetensors"
FORMAT = 2  # of the folder; 1 had one query for all heads of a group
KINDS = "queries", "keys"  # a layer's tensors


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """Learned matrices that project one layer's queries and keys to the few dims of an index."""

    queries: Tensor  # [Hk, r, D, d]
    keys: Tensor  # [Hk, D, d]

    @property
    def dim(self) -> int:
        return self.keys.shape[2]

    def is_whole(self) -> bool:
        """Return whether the shapes of the layer's two matrices fit each other."""
        heads, _, dims, dim = self.queries.shape if self.queries.ndim == 4 else (0, 0, 0, 0)
        return heads * dim > 0 and self.keys.shape == (heads, dims, dim)

    @torch.no_grad()
    def of_queries(self, q: Tensor) -> Tensor:
        """Project queries q [B, H, T, D] to the index's dims, [B, H, T, d], in q's dtype."""
        projected = q.new_empty(*q.shape[:3], self.dim)
        for row, result in zip(q, projected, strict=True):  # a product of all rows would copy them
            torch.bmm(row, self.queries.flatten(0, 1), out=result)
        return projected

    @torch.no_grad()
    def of_keys(self, k: Tensor) -> Tensor:
        """Project keys k [T, B, Hk, D] to the index's dims, [T, B, Hk, d], in k's dtype."""
        projected = torch.bmm(k.flatten(0, 1).transpose(0, 1), self.keys)
        return projected.transpose(0, 1).unflatten(0, k.shape[:2])

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [B, H, T, D] and k [B, Hk, T, D], projected to the dims of the index."""
        maps = self.to(q.device, q.dtype)
        return q @ maps.queries.flatten(0, 1), k @ maps.keys

    def of_rank(self, rank: Rank) -> Self:
        """Return the matrices of a rank's heads, as views, where tensor parallelism and Ulysses
        spread heads over ranks: the former first, the latter within."""
        ranks = rank.layout.tensor * rank.layout.ulysses
        number = rank.along["tensor"] * rank.layout.ulysses + rank.along["ulysses"]
        return type(self)(*(x.chunk(ranks)[number] for x in (self.queries, self.keys)))

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return type(self)(self.queries.to(device, dtype), self.keys.to(device, dtype))


@dataclass(frozen=True, slots=True, repr=False)
class Index:
    """Learned matrices, by layer, for comparing pages; implements `sparse.pages.Selector`."""

    layers: Mapping[int, LayerIndex]  # by layer number: those without a window
    select: Selector | None = None  # reads the votes; None: the step's choice of the most votes
    placed: dict[Any, Any] = field(default_factory=dict, compare=False)  # see `at`

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        assert self.select is not None
        return self.select(votes, candidates)

    def __repr__(self) -> str:
        return f"Index(layers={len(self.layers)}, dim={self.dim}, select={self.select!r})"

    @property
    def dim(self) -> int:
        return max(layer.dim for layer in self.layers.values())

    def parameters(self) -> list[Tensor]:
        """Return the matrices for an optimizer; those that require gradients learn during steps."""
        return [x for layer in self.layers.values() for x in (layer.queries, layer.keys)]

    def learning(self) -> Self:
        """Let all matrices require gradients, so that steps train the index; return the index."""
        for parameter in self.parameters():
            parameter.requires_grad_()
        return self

    def learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(parameter.numel() for parameter in self.parameters()) * dtype.itemsize

    @torch.no_grad()
    def at(self, device: torch.device, dtype: torch.dtype) -> Mapping[int, LayerIndex]:
        """Return each layer's matrices on a device and in a dtype. Frozen ones are copied once for
        all steps, and again after a change; learning ones are copied at each call."""
        now = [(id(x), 0 if x.is_inference() else x._version) for x in self.parameters()]
        before, copies, _ = self.placed.get((device, dtype), (None, {}, None))
        if before != now or self.learns():  # fused optimizers leave `_version` as it was
            copies = {number: maps.to(device, dtype) for number, maps in self.layers.items()}
            self.placed[device, dtype] = (
                now,
                copies,
                self.layers,
            )  # keeps their ids in use
        return copies

    def refuse_misfit(self, layers: tuple[LayerSpec, ...], dim: int, ranks: int = 1) -> None:
        """Raise UnsupportedError unless the index has matrices to `dim` dims for exactly those
        layers of the model that choose pages. `layers` have the heads of one of `ranks` ranks."""
        choosing = {n for n, layer in enumerate(layers) if layer.attends() and layer.window is None}
        if missing := sorted(choosing - self.layers.keys()):
            raise UnsupportedError(
                f"index: it has no layer {missing[0]}, but the model has {len(layers)} layers; "
                "give the index that was made for this model"
            )
        if more := sorted(self.layers.keys() - choosing):
            raise UnsupportedError(
                f"index: layer {more[0]} does not exist in this model or has a window; give the "
                "index that was made for this model"
            )
        for number in sorted(choosing):
            spec, maps = layers[number], self.layers[number]
            narrow = min(dim, spec.head_dim)
            kv_heads, group, dims, width = maps.queries.shape
            shape = ranks * spec.query_heads, ranks * spec.kv_heads, spec.head_dim
            if (kv_heads * group, kv_heads, dims) != shape:
                raise UnsupportedError(
                    f"index: its layer {number} is for {kv_heads * group} query heads and "
                    f"{kv_heads} key heads of {dims} dims, but the model has {shape[0]} and "
                    f"{shape[1]} of {shape[2]} dims; give the index that was made for this model"
                )
            if width != narrow:
                raise UnsupportedError(
                    f"index: its keys have {width} dims in layer {number}, but sparse.index_dim "
                    f"asks for {narrow}; set sparse.index_dim to {width}"
                )

    def save(self, folder: Path | str) -> None:
        """Write the index to a folder: float32 tensors and a config. Raises WriteFailed."""
        about = {"format": FORMAT, "kind": "farspan index", "dim": self.dim}
        folder = Path(folder)
        with writing(folder, SafetensorError):
            save_file(self._tensors(), folder / TENSORS)
            write_bytes(folder / CONFIG, (json.dumps(about) + "\n").encode())

    def digest(self) -> str:
        """Return the SHA-256 of the matrices, the same in whatever folder they are saved."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"layers.{number}.{name}": getattr(layer, name).detach().float().cpu()
            for number, layer in self.layers.items()
            for name in KINDS
        }

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read an index that `save` wrote. Raises UnsupportedError if there is none."""
        folder = Path(folder)
        about = read_json(folder / CONFIG)
        if about is None or about.get("format") != FORMAT:
            raise UnsupportedError(
                f"index: {folder} holds no index of format {FORMAT} ({CONFIG}); give the folder "
                "that an index was saved to, or make one with farspan index"
            )
        try:
            tensors = load_file(folder / TENSORS)
        except (OSError, SafetensorError) as error:
            raise UnsupportedError(
                f"index: cannot read {folder / TENSORS}: {error}; save the index again"
            ) from error
        numbers = sorted({int(n) for n in re.findall(r"layers\.(\d+)\.keys", " ".join(tensors))})
        names = {f"layers.{n}.{kind}" for n in numbers for kind in KINDS}
        layers = {}
        if names == tensors.keys():
            layers = {n: LayerIndex(*(tensors[f"layers.{n}.{k}"] for k in KINDS)) for n in numbers}
        if not layers or not all(layer.is_whole() for layer in layers.values()):
            raise UnsupportedError(
                f"index: {folder / TENSORS} has tensors other than queries and keys of layers; "
                "give the folder that an index was saved to"
            )
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not tensor.float().isfinite().all():
                raise UnsupportedError(
                    f"index: {name} of {folder / TENSORS} ({tensor.dtype}) must have finite "
                    "floating-point numbers; save the index again"
                )
        return cls(layers)


# -- learning --------------------------------------------------------------------------------------

LESSONS = 4  # pages of queries that an index learns from, per cell
HIDDEN = -1e30  # score of a page that a query does not see: finite, for rows without visible pages


class Taught(NamedTuple):
    """A training example of an index: one page of queries, and the keys of its chosen pages."""

    q: Tensor  # [B, H, Q, D]
    k: Tensor  # [B, Hk, n, P, D], of the chosen pages
    lse: Tensor  # [B, H, Q], over all visible keys
    seen: Tensor  # bool, [B, Hk, Q, n, P] or a shape that expands to it
    scale: float
    softcap: float | None = None


def lesson(
    call: SparseCall, q: Tensor, lse: Tensor, choice: Tensor, number: int, k: Tensor
) -> Taught:
    """Return the training example for page `number` of a chunk's queries q [B, H, C, D], given
    `lse` over all visible keys, the choice of pages, and the earlier keys k [T, B, KV heads, D]."""
    (batch, heads), page = choice.shape[:2], call.far.page
    span = slice(number * call.far.query_tokens, (number + 1) * call.far.query_tokens)
    pages = choice[:, :, number].long()
    token = pages[..., None] * page + torch.arange(page, device=k.device)  # [B, Hk, n, P]
    row = torch.arange(batch, device=k.device).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=k.device).view(-1, 1, 1)
    seen = token.unsqueeze(2) >= 0
    if call.far.documents is not None:
        seen = seen & (token.unsqueeze(2) >= call.far.documents[:, None, span, None, None])
    k = k[token.clamp_(min=0), row, head]
    return Taught(q[:, :, span], k, lse[:, :, span], seen, call.far.scale, call.near.softcap)


def divergence(maps: LayerIndex, taught: Taught) -> Tensor:
    """Return an index's loss: sum(m log(m / M) - m log p) over pages, queries and heads. m is the
    model's attention mass on a page, M a query's sum of m, and p the softmax of the index's
    scores."""
    mass = _mass(taught)
    q = taught.q.to(mass.dtype) @ maps.queries.flatten(0, 1)
    k = taught.k.to(mass.dtype).flatten(2, 3) @ maps.keys
    scores = taught.scale * _stacked(q, len(maps.keys)) @ k.mT
    scores = _pages_of(scores, taught).masked_fill(~taught.seen.unsqueeze(2), HIDDEN).amax(5)
    share = mass / mass.sum(4, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    return (torch.xlogy(mass, share) - mass * scores.log_softmax(4)).sum()


@torch.no_grad()
def _mass(taught: Taught) -> Tensor:
    """Return the model's attention mass (sum of softmax weights) on each chosen page, by query."""
    kv_heads, dtype = taught.k.shape[1], taught.lse.dtype
    q, lse = (_stacked(x.to(dtype), kv_heads) for x in (taught.q, taught.lse))
    scores = (q @ taught.k.to(dtype).flatten(2, 3).mT).mul_(taught.scale)
    if taught.softcap is not None:
        scores = taught.softcap * torch.tanh(scores / taught.softcap)
    weights = _pages_of(scores.sub_(lse.unsqueeze(3)).exp_(), taught)
    return weights.masked_fill_(~taught.seen.unsqueeze(2), 0.0).sum(5)


def _stacked(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _pages_of(scores: Tensor, taught: Taught) -> Tensor:
    """Split the last two dims of scores into (query head, query) and (page, token)."""
    return scores.unflatten(3, taught.k.shape[2:4]).unflatten(2, (-1, taught.q.shape[2]))


def learn(maps: LayerIndex, taught: Taught) -> None:
    """Add the gradient of the loss `divergence` to the `.grad` of a layer's learned matrices."""
    leaves = [x for x in (maps.queries, maps.keys) if x.requires_grad]
    # Saved-tensor hooks of the cell must not see the tensors of this graph.
    with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
        wide = maps.to(taught.q.device, taught.lse.dtype)
        gradients = torch.autograd.grad(divergence(wide, taught), leaves)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


def _itself(x: Tensor) -> Tensor:
    return x


PLACES = 4  # positions in a context at which a text is read


@torch.no_grad()
def principal_index(
    model: nn.Module, input_ids: Tensor, dim: int, context: int | None = None
) -> Index:
    """Return an index to start training from. For each key head and the query heads that share it,
    the index's `dim` dims are those in which products of queries and keys vary most on a text,
    input_ids [B, T].

    With second moments A of queries and C of centred keys, the singular values of A^(1/2) C^(1/2)
    measure the share of a dim; terms that all keys of a query share do not matter. Rotary embedding
    turns queries and keys by their positions, slow dims over a whole sequence: the text is read at
    `PLACES` positions of a sequence of `context` tokens, T if None. Attention is computed at once,
    T x T: a few thousand tokens are enough. Heads with fewer dims keep all. Raises
    UnsupportedError.
    """
    if not isinstance(dim, int) or dim < 1:
        raise UnsupportedError(f"dim: expected a whole number of at least 1, got {dim!r}")
    read: dict[int, _Moments] = {}

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        if keywords.get("sliding_window") is None:
            moments = _Moments.of(q, k)
            if module.layer_idx in read:
                read[module.layer_idx].add(moments)
            else:
                read[module.layer_idx] = moments
        return attended(reference, q, k, v, scale, keywords)

    stages = CausalLMStages(model)
    make_inputs(input_ids, input_ids, None, stages.vocab)  # refuses ids outside the vocabulary
    tokens = input_ids.shape[1]
    context = tokens if context is None else context
    if not isinstance(context, int) or context < tokens:
        raise UnsupportedError(
            f"context: expected a whole number of at least the text's {tokens} tokens, got "
            f"{context!r}; give the longest context of the training, or a shorter text"
        )
    refuse_context(stages.model, context)
    last = context - tokens
    positions = torch.arange(tokens, device=input_ids.device).expand_as(input_ids)
    with routed(stages.model), answering(attention):
        for start in (places := sorted({last * n // (PLACES - 1) for n in range(PLACES)})):
            stages.model.base_model(
                input_ids=input_ids, position_ids=positions + start, use_cache=False
            )
    if not read:
        raise UnsupportedError(
            "model: each of its layers has a window or no attention, so there are no pages to "
            "choose; use the model without an index"
        )
    return Index({n: moments.principal(dim, len(places)) for n, moments in read.items()})


@dataclass(slots=True)
class _Moments:
    """Second moments of a layer's queries and keys in a forward of a text, or their sums over
    several forwards, in float64."""

    group: int
    queries: Tensor  # means of products of a query's elements, [Hk, D, D]
    keys: Tensor
    key: Tensor  # the mean of keys, [Hk, 1, D]

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Self:
        group = q.shape[1] // k.shape[1]
        q = q.double().unflatten(1, (-1, group)).movedim(1, 0).flatten(1, 3)
        k = k.double().movedim(1, 0).flatten(1, 2)
        return cls(group, q.mT @ q / q.shape[1], k.mT @ k / k.shape[1], k.mean(1, keepdim=True))

    def add(self, other: Self) -> None:
        """Add second moments of another forward's queries and keys; `principal` averages them."""
        self.queries += other.queries
        self.keys += other.keys
        self.key += other.key

    def principal(self, dim: int, places: int) -> LayerIndex:
        key = self.key / places
        of_q, back_q = _roots(self.queries / places)
        of_k, back_k = _roots(self.keys / places - key.mT @ key)
        left, values, right = torch.linalg.svd(of_q @ of_k)
        each = values[:, None, :dim].sqrt()
        queries, keys = back_q @ left[..., :dim] * each, back_k @ right.mT[..., :dim] * each
        return LayerIndex(queries.unsqueeze(1).repeat(1, self.group, 1, 1).float(), keys.float())


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square roots of symmetric positive semidefinite matrices [n, D, D], and the roots'
    inverses. Eigenvalues are raised to at least 1e-9 of a matrix's largest, so that inverses
    exist."""
    values, vectors = torch.linalg.eigh(moments)
    least = 1e-9 * values.amax(1, keepdim=True) + 1e-30  # for a head whose keys are all equal
    values = values.clamp(min=least).sqrt().unsqueeze(1)
    return vectors * values @ vectors.mT, vectors / values @ vectors.mT


def reading(selector: object, function: Any) -> Any:
    """Let `function` choose the pages. Returns `function` or, if `selector` is an index, the index
    with `function`, which then still reads the index's votes."""
    return replace(selector, select=function) if isinstance(selector, Index) else function
