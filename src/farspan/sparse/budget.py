"""Find the budget of sparse attention that suits a model and a text."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import AttentionCall, KeyValues, attend
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import IGNORED, make_inputs
from farspan.engine.step import Step
from farspan.formatting import write_tokens
from farspan.hf.attention_interface import answering, routed
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import refuse_context
from farspan.program.attention_blocks import layer_blocks
from farspan.sparse.attend import sampled
from farspan.sparse.index import Index
from farspan.sparse.pages import RandomPages, mean_keys, vote
from farspan.spec import INDEX, SELECTORS, LayerSpec, Schedule, Sparse, UnsupportedError

RANDOM = "random"
ENOUGH = 0.9  # of the mass; the default of `SparseConfig.warn_below`
QUERY_PAGES = 16  # pages of queries whose choices are measured
LAST = 4  # losses are those of the last quarter of the tokens, with the most pages to choose from
LOGITS = 512  # tokens at one time


@dataclass(frozen=True, slots=True)
class KeptMass:
    """The share of dense attention's mass that queries see with sparse attention (1: all mass),
    measured for each selector, layer and budget; means over queries and heads."""

    sparse: Sparse  # without its budget and selector
    chunk: int
    tokens: int
    queries: int
    pages: int  # candidate pages
    budgets: tuple[int, ...]  # tokens, ascending, from none to all pages
    layers: tuple[int, ...]  # layers with a choice of pages, from 0
    others: int  # layers with a window, or without attention
    kept: dict[str, list[list[float]]]  # by name: one list per layer, one value per budget
    dense_loss: float  # loss of the last quarter of the tokens

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the selectors, random pages included."""
        return tuple(self.kept)

    def mean(self, name: str, place: int) -> float:
        """Return the mean share, over layers, of attention that is kept with `budgets[place]`."""
        return fmean(layer[place] for layer in self.kept[name])

    def worst(self, name: str, place: int) -> tuple[float, int]:
        """Return (share, layer) for the layer that keeps least attention with `budgets[place]`."""
        return min((row[place], n) for row, n in zip(self.kept[name], self.layers, strict=True))

    def enough(self, name: str) -> int:
        """Return the smallest budget (tokens) to keep `ENOUGH` of the attention on average."""
        return next(b for i, b in enumerate(self.budgets) if self._keeps(self.mean(name, i), b))

    def enough_everywhere(self, name: str) -> tuple[int, int]:
        """Return the smallest budget that keeps `ENOUGH` in every layer, and the neediest layer."""
        place = next(
            i for i, b in enumerate(self.budgets) if self._keeps(self.worst(name, i)[0], b)
        )
        return self.budgets[place], self.worst(name, max(0, place - 1))[1]

    def _keeps(self, mass: float, budget: int) -> bool:
        return mass >= ENOUGH or budget == self.budgets[-1]  # all pages, up to rounding

    def best(self) -> str:
        """Return the selector that keeps `ENOUGH` of the attention with the smallest budget."""
        return min(
            (name for name in self.names if name != RANDOM),
            key=lambda name: (self.enough(name), self.enough_everywhere(name)[0]),
        )

    def advised(self) -> Sparse | None:
        """Return the sparse attention advised for training; None if no budget below all pages keeps
        the share `ENOUGH`. A single layer may need a larger budget than the model on average."""
        name, everything = self.best(), self.budgets[-1]
        whole, layers = self.enough(name), self.enough_everywhere(name)[0]
        if whole == everything:
            return None
        budget = layers if whole == 0 and layers < everything else whole
        return replace(self.sparse, budget=budget, selector=name)

    def judged(self) -> int:
        """Return the budget for comparing losses: the advised, else the largest below all pages."""
        advised = self.advised()
        return self.budgets[-2] if advised is None else advised.budget

    @property
    def own(self) -> int:
        """Number of tokens in the last chunk."""
        return (self.tokens - 1) % self.chunk + 1

    def to_json(self) -> dict[str, Any]:
        advised = self.advised()
        return {
            **asdict(self),
            "enough": {name: self.enough(name) for name in self.names},
            "enough_everywhere": {name: self.enough_everywhere(name)[0] for name in self.names},
            "advised": None if advised is None else asdict(advised),
        }


def ladder(pages: int, page: int) -> tuple[int, ...]:
    """Return the budgets to measure (tokens): 0, one page, then doubled up to all pages."""
    counts = [0, *(1 << power for power in range(pages.bit_length()) if 1 << power < pages), pages]
    return tuple(count * page for count in counts)


@dataclass(slots=True)
class _Reader:
    """Computes a model's dense attention, and measures the share of its mass that sparse attention
    sees.

    Legend: B batch, H query heads, Hk K, V heads, T tokens, D head dim, M pages of Q queries of the
    last chunk, which misses most; n candidate pages.
    """

    sparse: Sparse
    start: int  # first token of the last chunk
    positions: Tensor  # [M, Q], int64
    kernels: AttentionKernels
    seed: int
    index: Index | None  # compared as a selector, too
    kept: dict[str, list[Tensor]]  # by name: one [n + 1] per layer, by number of pages chosen

    def attend(
        self,
        layer: int,
        spec: LayerSpec,
        _: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        **keywords: Any,
    ) -> Tensor:
        """Return a layer's dense attention [B, T, H, Dv]; record the share each selector keeps."""
        sinks, tokens = keywords.get("s_aux"), q.shape[2]
        if spec.window is None:
            for name, mass in self.masses(layer, q, k, scale, spec.softcap, sinks).items():
                self.kept[name].append(mass)
        blocks = layer_blocks(spec, (0, tokens), tokens, q.shape[0])
        call = AttentionCall(scale, spec.softcap, blocks, 0, self.kernels.of(spec))
        # A chunk that begins the sequence asks for no earlier keys.
        out, _lse = attend(call, q, k, v, cast(KeyValues, None), sinks)
        return out.transpose(1, 2)

    def masses(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return, by selector, the share of attention that queries see with 0 to n chosen pages, [n
        + 1]: means over queries and heads. Pages are ranked by votes once, since a small budget's
        pages are among those of a larger budget."""
        far = self._far(q, k, scale, softcap, sinks)
        queries = q.shape[0] * q.shape[1] * self.positions.numel()
        near, masses = queries - far.sum(), {}
        for name in self.kept:
            votes = self._votes(name, layer, q, k, scale)
            order = votes.sort(dim=3, descending=True, stable=True).indices
            chosen = far.gather(3, order).sum((0, 1, 2)).cumsum(0)
            masses[name] = ((near + pad(chosen, (1, 0))) / queries).cpu()
        return masses

    def _far(
        self, q: Tensor, k: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Return dense attention's mass on each candidate page, [B, KV heads, query pages, pages],
        summed over each page of queries and the heads that share K, V."""
        dtype, page = accumulate_dtype(q.dtype), self.sparse.page
        pages, kv_heads = self.sparse.candidates(self.start), k.shape[1]
        keys, page_masses = k.to(dtype).mT, []
        key = torch.arange(k.shape[2], device=q.device)
        for places in self.positions:
            # The heads of a group stacked: their keys are read once, not copied for each.
            queries = q[:, :, places].to(dtype).unflatten(1, (kv_heads, -1)).flatten(2, 3)
            scores = (queries @ keys).mul_(scale).unflatten(2, (-1, len(places)))
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores.masked_fill_(key > places[:, None], -torch.inf)
            lse = scores.logsumexp(4, keepdim=True)
            if sinks is not None:
                lse = lse.logaddexp(sinks.to(dtype).view(kv_heads, -1, 1, 1))
            weights = (scores[..., pages.start * page : pages.stop * page] - lse).exp_()
            page_masses.append(weights.unflatten(4, (-1, page)).sum((2, 3, 5)))
        return torch.stack(page_masses, 2)

    def _votes(self, name: str, layer: int, q: Tensor, k: Tensor, scale: float) -> Tensor:
        pages = self.sparse.candidates(self.start)
        if name == RANDOM:
            shape = *k.shape[:2], len(self.positions), len(pages)
            generator = torch.Generator().manual_seed(self.seed + len(self.kept[RANDOM]))
            return torch.rand(shape, generator=generator).to(q.device)
        sparse = replace(self.sparse, selector=name)
        before = k[:, :, pages.start * sparse.page : pages.stop * sparse.page]
        queries = q[:, :, self.positions.flatten()]
        if name == INDEX:
            assert self.index is not None
            queries, before = self.index.layers[layer].compared(queries, before)
        means = mean_keys(before.permute(2, 0, 1, 3), sparse.mean_tokens).permute(1, 2, 0, 3)
        return vote(queries, means, sparse, scale, None, pages.start)


@torch.no_grad()
def kept_masses(
    model: nn.Module,
    input_ids: Tensor,
    schedule: Schedule,
    seed: int,
    index: Index | None = None,
) -> KeptMass:
    """Measure the share of dense attention that each selector keeps with each budget, by one dense
    pass over tokens [batch, tokens]; a last page that is not whole is left out. Page size, recent
    tokens, sinks and chunk are the schedule's; an `index` is measured as one more selector. Raises
    UnsupportedError if there are no pages to choose from."""
    stages, sparse = CausalLMStages(model), schedule.sparse
    assert sparse is not None
    specs = describe(stages).layers
    choosing = tuple(n for n, spec in enumerate(specs) if spec.window is None and spec.attends())
    if not choosing:
        raise UnsupportedError(
            "model: each of its layers has a window or no attention, so there are no pages to "
            "choose: sparse attention changes nothing"
        )
    if index is not None:
        index.refuse_misfit(specs, sparse.index_dim)
    tokens = whole_tokens(input_ids.shape[1], schedule)
    ids = input_ids[:, :tokens].to(stages.device)
    positions = make_inputs(ids, ids, None, stages.vocab).position_ids
    refuse_context(stages.model, tokens)
    start = (tokens - 1) // schedule.chunk * schedule.chunk
    last = torch.arange(start, tokens, device=ids.device).unflatten(0, (-1, sparse.query_tokens))
    sample = sampled(len(last), QUERY_PAGES)
    reader = _Reader(
        sparse,
        start,
        last[sample.start : sample.stop : sample.step],
        AttentionKernels(stages.device, stages.dtype),
        seed,
        index,
        {name: [] for name in choosers(index)},
    )
    with routed(stages.model):
        hidden, calls = stages.embed(ids, positions)
        for layer, call in enumerate(calls):
            with answering(partial(reader.attend, layer, specs[layer])):
                hidden = stages.run_layer(layer, hidden, call)
        loss = _loss(stages, hidden, ids)
    pages = len(sparse.candidates(start))
    budgets = ladder(pages, sparse.page)
    counts = [budget // sparse.page for budget in budgets]
    return KeptMass(
        sparse=replace(sparse, budget=0, selector=SELECTORS[0]),
        chunk=schedule.chunk,
        tokens=tokens,
        queries=len(ids) * reader.positions.numel(),
        pages=pages,
        budgets=budgets,
        layers=choosing,
        others=len(specs) - len(choosing),
        kept={name: [row[counts].tolist() for row in rows] for name, rows in reader.kept.items()},
        dense_loss=loss,
    )


def choosers(index: Index | None) -> tuple[str, ...]:
    return *SELECTORS, *((INDEX,) if index is not None else ()), RANDOM


def whole_tokens(tokens: int, schedule: Schedule) -> int:
    """Return the number of a text's tokens in whole pages. Raises UnsupportedError, with a remedy,
    if the last chunk has no pages to choose from."""
    sparse = schedule.sparse
    assert sparse is not None
    if tokens <= sparse.page:
        raise UnsupportedError(
            f"sparse.page: a page of {sparse.page:,} tokens does not fit into a text of "
            f"{tokens:,}; give more text with a longer --context, or a smaller page"
        )
    whole = tokens // sparse.page * sparse.page
    start = (whole - 1) // schedule.chunk * schedule.chunk
    if sparse.candidates(start):
        return whole
    recent = start // 4 // sparse.page * sparse.page
    pages = replace(sparse, recent=recent).candidates(start)
    fewer = f"recent={write_tokens(recent)} in --sparse"
    fewer = fewer if pages else "a smaller --chunk, page, recent and sinks"
    raise UnsupportedError(
        f"context: the last chunk of {write_tokens(tokens)} tokens, from token {start:,} on, sees "
        f"all tokens before it as {write_tokens(sparse.recent)} recent tokens and "
        f"{write_tokens(sparse.sinks)} sinks, so there are no pages to choose from; give a longer "
        f"--context (and text), or {fewer}"
    )


def _loss(stages: CausalLMStages, hidden: Tensor, ids: Tensor) -> float:
    tokens, total = ids.shape[1], 0.0
    first = tokens - tokens // LAST
    for begin in range(first, tokens, LOGITS):
        stop = min(begin + LOGITS, tokens)
        logits = stages.logits(hidden[:, begin - 1 : stop - 1])
        logits = logits.to(accumulate_dtype(logits.dtype)).flatten(0, 1)
        total += float(cross_entropy(logits, ids[:, begin:stop].flatten(), reduction="sum"))
    return total / (len(ids) * (tokens - first))


def sparse_losses(
    model: nn.Module,
    input_ids: Tensor,
    schedule: Schedule,
    budget: int,
    seed: int,
    index: Index | None = None,
    begin: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """Return, by selector, the mean loss of the last quarter of the tokens with sparse attention.
    Calls `begin` with the selector's name before each pass, which takes as long as a dense pass."""
    sparse, losses = schedule.sparse, {}
    assert sparse is not None
    ids = input_ids[:, : whole_tokens(input_ids.shape[1], schedule)]
    labels = ids.clone()
    labels[:, : -(ids.shape[1] // LAST)] = IGNORED
    others = {RANDOM: RandomPages(budget // sparse.page, seed), INDEX: index}
    for name in choosers(index):
        begin(name)
        settings = replace(sparse, budget=budget, selector=SELECTORS[0] if name == RANDOM else name)
        step = Step(model, replace(schedule, sparse=settings), selector=others.get(name))
        losses[name] = float(step.evaluate(ids, labels))
    return losses
