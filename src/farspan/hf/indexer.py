"""Run the indexers of layers whose queries attend to chosen tokens (DeepSeek sparse attention).

An indexer scores every token of the prefix for each query, by a small key of each token (its index
key), and chooses the `index_topk` tokens with the highest scores. transformers 5.24 runs it without
autograd, so its weights get no gradient. It scores all queries against all tokens at once, which
takes heads x queries x tokens numbers; here its own code runs on a few queries at a time.

Scores are sums of products with relu, so many are exactly 0, and torch.topk breaks such ties by the
length of its rows and the places of scores in them. So each row has the length of the whole
sequence here too, with -inf in the places of later tokens.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from farspan.hf.swap import Part
from farspan.spec import Indexer, UnsupportedError

# Arguments of the indexers that can run in pieces, besides those of other names that are tensors
# with tokens second.
_MASK, _CACHE = "attention_mask", "cache"
_HOOK = "farspan_indexer"


class _KeysKnown(Exception):
    """Exception that stops an indexer once its index keys are known."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


@dataclass(frozen=True, slots=True)
class _Keys:
    """Stand-in for a cache that returns given index keys, or stops the indexer if None are."""

    given: Tensor | None = None

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.given is None:
            raise _KeysKnown(keys)
        return self.given


class _OfWholeRows(TorchFunctionMode):
    """Mode in which topk fills rows up to `tokens` scores with -inf, and chooses `count`."""

    def __init__(self, tokens: int, count: int) -> None:
        super().__init__()
        self.tokens, self.count = tokens, count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.topk:
            missing = self.tokens - args[0].shape[-1]
            row = nn.functional.pad(args[0], (0, missing), value=-torch.inf)
            args = row, self.count, *args[2:]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class IndexerCall:
    """A layer's call of its indexer for the tokens of a chunk."""

    module: Any
    given: dict[str, Any]  # arguments by name
    hidden: Tensor  # [B, C, hidden]

    @property
    def sizes(self) -> Indexer:
        names = "n_heads", "head_dim", "index_topk", "qk_rope_head_dim"
        heads, dim, tokens, rotated = (int(getattr(self.module, name, 0)) for name in names)
        kinds = getattr(self.module.config, "indexer_types", None) or ()
        return Indexer(heads, dim, tokens, rotated, passed="shared" in kinds)

    def keys(self) -> Tensor:
        """Return the chunk's index keys [B, C, D]."""
        try:
            self._run(_Keys(), None, self.given)
        except _KeysKnown as found:
            return found.keys
        raise UnsupportedError(
            f"model: {type(self.module).__name__} stores no index keys in its cache"
        )

    def choose(self, keys: Tensor, first: int, tokens: int, begins: Tensor | None = None) -> Tensor:
        """Return the tokens that the chunk's queries attend to, [B, C, topk] int32.

        Args:
            keys: Index keys of the chunk's and all earlier tokens, [B, T, D].
            first: The chunk's first token.
            tokens: Length of the whole sequence.
            begins: First token of each query's document, [B or 1, C]; None: the first of the row.
        """
        batch, count = self.hidden.shape[:2]
        width = min(self.sizes.tokens, tokens)
        chosen = torch.empty(batch, count, width, dtype=torch.int32, device=keys.device)
        size = self.sizes.piece(tokens)
        places = torch.arange(keys.shape[1], device=keys.device)
        for row in range(batch):
            for start in range(0, count, size):
                queries = slice(start, min(start + size, count))
                own = slice(row, row + 1)
                last = places[first + queries.start : first + queries.stop, None]
                seen = places <= last
                if begins is not None:
                    of_row = begins[own] if len(begins) > 1 else begins
                    seen &= places >= of_row[0, queries, None]
                given = tree_map(partial(self._part, own, queries), self.given)
                with _OfWholeRows(tokens, width):
                    chosen[own, queries] = self._run(_Keys(keys[own]), seen[None], given)
        return chosen

    def blank(self, tokens: int) -> Tensor:
        """Return a stand-in for the result of `choose`, in which all queries see the first token
        of the sequence."""
        shape = *self.hidden.shape[:2], min(self.sizes.tokens, tokens)
        return torch.zeros(shape, dtype=torch.int32, device=self.hidden.device)

    def _part(self, rows: slice, queries: slice, x: Any) -> Any:
        """Return an argument's part for some queries of a row."""
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != self.hidden.shape[1]:
            return x
        return (x[rows] if len(x) > 1 else x)[:, queries]

    def _run(self, cache: _Keys, mask: Tensor | None, given: dict[str, Any]) -> Tensor:
        named = {**given, _MASK: mask, _CACHE: cache}
        found: Tensor = type(self.module).forward(self.module, **named)
        return found


Choose = Callable[[IndexerCall], Tensor]  # called instead of an indexer's forward


def choose_whole(call: IndexerCall) -> Tensor:
    """Return the tokens chosen if the chunk is a whole sequence of one document."""
    return call.choose(call.keys(), 0, call.hidden.shape[1])


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer that can run in pieces: it takes a mask, and a cache
    for its index keys."""
    sizes = all(hasattr(module, name) for name in ("n_heads", "head_dim", "index_topk"))
    return sizes and {_MASK, _CACHE, "hidden_states"} <= set(_names(module))


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]


def indexers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_indexer(module)]


def indexed_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters in indexers, to which no loss gives a gradient."""
    return {id(p) for module in indexers_of(model) for p in module.parameters()}


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters to which a step gives gradients."""
    inside = indexed_parameters(model)
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]


def _forward(module: nn.Module, choose: Choose, *arguments: Any, **keywords: Any) -> Tensor:
    given = {**dict(zip(_names(module), arguments, strict=False)), **keywords}
    del given[_MASK]
    given.pop(_CACHE, None)
    return choose(IndexerCall(module, given, given["hidden_states"]))


def _masked(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Add a mask of one element to the decoder's arguments, which it passes on unchanged: layers
    give their indexer a part of the mask, and so need one."""
    if keywords.get(_MASK) is None:
        keywords = {**keywords, _MASK: torch.ones(1, 1, 1, 1, dtype=torch.bool)}
    return arguments, keywords


def is_blank(mask: Tensor) -> bool:
    """Return whether a mask is the one of `choosing`, which hides nothing."""
    return mask.numel() == 1


def choosing(model: PreTrainedModel, choose: Choose) -> Iterator[Part]:
    """Yield the parts to put into a model so that its indexers' choices are made by `choose`."""
    found = indexers_of(model)
    for module in found:
        yield vars(module), "forward", partial(_forward, module, choose)
    decoder: nn.Module | None = model.get_decoder() if found else None
    if decoder is not None:
        yield decoder._forward_pre_hooks, _HOOK, _masked
        yield decoder._forward_pre_hooks_with_kwargs, _HOOK, True
