"""The nouns of farspan: models, runs, machines and schedules.

Everything here is an immutable value and imports no torch. Token ranges are half open, sizes are
bytes unless a name says otherwise, and `0 <= fraction <= 1`.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from operator import itemgetter
from typing import NamedTuple, TypeVar, dataclass_transform

VERSION = "0.1.0"

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(of: type[T]) -> type[T]:
    """Make a dataclass that only type checkers treat as frozen: truly frozen ones take four times
    as long to create, and a plan creates 400,000."""
    return dataclass(slots=True, unsafe_hash=True)(of)


class UnsupportedError(ValueError):
    """A request that farspan cannot meet exactly. The message says which field, and what to
    type."""


class Tier(StrEnum):
    """The kind of memory in which a buffer lives. On a machine without a GPU the two tiers are two
    arenas in main memory, so every fetch and evict really copies."""

    DEVICE = "device"
    HOST = "host"


# For loops: Python 3.11 takes ten times as long to look up a member by its class.
DEVICE, HOST = Tier


class Quantization(StrEnum):
    """Formats of the frozen weights of linear modules while adapters are trained."""

    NF4 = "nf4"  # four bits, and eight for each block of 64 (bitsandbytes, double quantisation)

    @classmethod
    def _missing_(cls, value: object) -> "Quantization | None":
        """Accept the names that other libraries have for a format."""
        word = "".join(filter(str.isalnum, str(value).lower()))
        return cls.NF4 if word in ("nf4", "4", "4bit", "bnb4bit", "loadin4bit", "qlora") else None


class Reference(StrEnum):
    """Where the log-probabilities of a loss's reference model or teacher come from."""

    NONE = "none"
    FROZEN = "frozen"  # a second copy of the weights, evaluated each step
    ADAPTERS_OFF = "adapters-off"  # the same weights without their adapters, evaluated each step
    STORED = "stored"  # with the data


class LossRow(NamedTuple):
    """Properties of one kind of training loss."""

    references: tuple[Reference, ...] = (Reference.NONE,)  # that it may have, the default first
    keys: tuple[str, ...] = ()  # of `LossKeys`, those that it uses
    format: str = ""  # `data.format` that it trains; "": any that no other loss needs
    of_loops: str = ""  # why only a user's own training loop has it; "": a run file may


PAIRS, LABELLED = "preference", "unpaired"  # formats of records that losses compare
_COMPARED = Reference.STORED, Reference.FROZEN, Reference.ADAPTERS_OFF


class LossKind(StrEnum):
    """The training loss. All but `sft` are computed from log-probabilities of the whole sequence,
    after which the backward runs from their gradient (`Step.logprobs`)."""

    row: LossRow

    def __new__(cls, name: str, *row: LossRow) -> "LossKind":
        kind = str.__new__(cls, name)
        kind._value_, (kind.row,) = name, row
        return kind

    SFT = "sft", LossRow()  # a mean of token losses, in one pass
    DPO = "dpo", LossRow(_COMPARED, ("beta", "label_smoothing", "by_length", "reference"), PAIRS)
    IPO = "ipo", LossRow(_COMPARED, ("beta", "reference"), PAIRS)
    ORPO = "orpo", LossRow(keys=("beta",), format=PAIRS)
    KTO = (
        "kto",
        LossRow(
            _COMPARED, ("beta", "desirable_weight", "undesirable_weight", "reference"), LABELLED
        ),
    )
    GRPO = (
        "grpo",
        LossRow((Reference.NONE, *_COMPARED), of_loops="farspan train generates no answers"),
    )
    DISTILL = "distill", LossRow(_COMPARED, ("teacher", "top_k"))


ROUTER_KEYS = "router", "router_z"  # of `LossKeys`, for every kind


@dataclass(frozen=True, slots=True)
class LossKeys:
    """Keys of the loss in a run file. `kind` and `ROUTER_KEYS` belong to all kinds of loss, each
    other key to the kinds whose `LossRow` lists it."""

    kind: LossKind = LossKind.SFT  # loss to train; `dpo`, `ipo` and `orpo` compare answers
    beta: float = 0.1  # how closely preference losses hold the policy to the reference
    label_smoothing: float = 0.0  # share of pairs that `dpo` takes for swapped
    by_length: bool = False  # `dpo` takes means over answers instead of sums
    desirable_weight: float = 1.0  # factor of the losses of desirable answers in `kto`
    undesirable_weight: float = 1.0  # factor of the losses of undesirable answers in `kto`
    reference: Reference | None = None  # what `dpo`, `ipo` and `kto` compare with; null: `stored`
    teacher: str | None = None  # what `distill` learns from: a local folder or a name on the hub
    top_k: int = 64  # likeliest ids of the teacher that `distill` compares, per token
    router: float = 0.0  # coefficient of experts' load-balancing loss; the model's own is not used
    router_z: float = 0.0  # coefficient of the z-loss of its routers


class Cut(IntEnum):
    """Where a step is cut into a forward and a backward that begins when the forward is complete.

    Router losses need the number of tokens that each expert gets in all layers and chunks.
    """

    NONE = 0  # the last chunk goes back at once, so its forward runs once
    AFTER_LAYERS = 1
    AFTER_HEAD = 2  # with the head's values of every token


@dataclass(frozen=True, slots=True)
class Objective:
    """The kind of a step's loss, and the reference model that the loss compares the policy with."""

    kind: LossKind = LossKind.SFT
    reference: Reference = Reference.NONE
    ids: int = 1  # ids per token with log-probabilities; more than one only in distillation

    @property
    def is_cut(self) -> bool:
        """Return whether the backward waits for all log-probabilities of the sequence."""
        return self.kind is not LossKind.SFT

    @property
    def evaluates(self) -> bool:
        """Return whether each step runs a forward of the reference model."""
        return self.reference in (Reference.FROZEN, Reference.ADAPTERS_OFF)

    @property
    def forwards(self) -> int:
        """Return how many forwards a step runs without a backward, for a reference or KTO."""
        mismatched = self.kind is LossKind.KTO
        return mismatched + self.evaluates * (1 + mismatched)


class AttentionKernel(StrEnum):
    """The kernel for attention on CUDA: `auto` is the fastest, others are for comparisons."""

    AUTO = "auto"  # the fastest that `farspan calibrate` found here, else by the card
    CUDNN = "cudnn"  # if it is correct and its plans are few, flash attention otherwise
    FLASH = "flash"  # flash attention 2, included in PyTorch
    FA3 = "fa3"  # flash attention 3 and 4, whose packages must be installed; Hopper
    FA4 = "fa4"  # also data-centre Blackwell


class Products(StrEnum):
    """Lower precision of the layers' linear products: an approximation, used only on request."""

    FP8 = "fp8"  # e4m3 with a scale a row, by torchao's float8 training


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that a schedule uses; their results differ only in rounding, that of `products` more
    than the model's dtype does."""

    attention: AttentionKernel = AttentionKernel.AUTO
    # On CUDA, run norms, gates of MLPs, rotary embeddings and the loss on farspan's own kernels.
    fused: bool = True
    accumulate: bool = True  # on CUDA, products add weight gradients to their sums themselves
    remake: bool = True  # kept layers compute norms' outputs and act(gate) * up again
    compile: bool = False  # run norms and dense MLPs of the layers through torch.compile
    deterministic: bool = False  # on CUDA, the same bits from the same step, slower
    products: Products | None = None  # approximate linear products of layers; null: exact
    graphs: bool = False  # run steps of one shape as a CUDA graph; not measured yet

    def __post_init__(self) -> None:
        if self.attention not in tuple(AttentionKernel):
            raise UnsupportedError(
                f"attention: expected one of {', '.join(AttentionKernel)}, got {self.attention!r}"
            )
        object.__setattr__(self, "attention", AttentionKernel(self.attention))
        for field in ("fused", "accumulate", "remake", "compile", "deterministic", "graphs"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise UnsupportedError(f"{field}: expected true or false, got {value!r}")
        if self.products is not None:
            self._check_products()
        if self.graphs and (self.compile or self.products is not None):
            raise UnsupportedError("graphs: not supported with compile or products; leave it out")

    def _check_products(self) -> None:
        if self.products not in tuple(Products):
            raise UnsupportedError(f"products: expected null or fp8, got {self.products!r}")
        object.__setattr__(self, "products", Products(self.products))
        if self.compile:
            raise UnsupportedError(
                "products: fp8 does not run with compile: true; leave one of the two out"
            )


BACKWARD_PRODUCTS = 2.5  # attention's backward makes five matrix products, its forward two


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer's work and temporary memory, without attention's own products, per token and forward
    unless a name says otherwise. All zero: not counted, so no time is known."""

    parameters: int = 0  # elements of the layer's weights
    trainable: int = 0  # elements that receive a gradient
    products: tuple[tuple[int, int], ...] = ()  # (inner, outer) width of each matrix product
    projections: int = 0  # number of products, the first ones, before attention
    forward_traffic: int = 0  # bytes that operations other than products read and write
    backward_traffic: int = 0
    remade_traffic: int = 0  # of computing again, in a backward, what a kept cell does not store
    feed_forward: int = 0  # number of products, the last ones, in the feed-forward
    skippable: bool = True  # no gradient depends on the value of the feed-forward's output
    packed: int = 0  # bytes that quantised weights save compared with the model's dtype


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a recurrent layer passes from one chunk to the next, instead of K and V."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    element_bytes: int
    row: int = 0  # elements per token of a chunk's rows, which hold it; 0: no chunks are known


SCORES = 1 << 28  # bytes of the scores that an indexer computes at one time


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sizes of a layer's indexer, by which each query chooses the tokens that it attends to."""

    heads: int
    dim: int  # of a token's index key, which all heads share
    tokens: int  # that a query chooses
    rotated: int = 0  # elements of an index key that RoPE rotates
    wide: bool = False  # index keys have the accumulate dtype
    passed: bool = False  # later layers attend to the chosen tokens too; of these, dim is 0

    def piece(self, tokens: int) -> int:
        """Return how many queries are scored at one time in a sequence of `tokens` tokens."""
        return max(1, SCORES // (4 * self.heads * tokens))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Sizes of one decoder layer that decide memory and the time of attention. A layer without
    attention has no heads, and a window of one token, the query itself."""

    query_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values; equal to head_dim for nearly every model
    window: int | None = None  # a query sees itself and the `window - 1` tokens before it
    # Documents are cut every `window` tokens instead, and a query sees its piece (Llama 4).
    chunked: bool = False
    sinks: bool = False  # one learned logit per head joins the softmax (GPT-OSS)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma2)
    activation_bytes: int = 0  # per token; saved by autograd besides x, K, V, O and LSE
    activation_constant: int = 0  # per cell; the part of the above that does not grow with tokens
    saves_input: bool = True  # autograd saves the layer's input itself, not only a cast of it
    work: LayerWork = LayerWork()
    state: tuple[StateTensor, ...] = ()  # read by every cell, in every attention mode
    indexer: Indexer | None = None  # a query sees the tokens that the layer's indexer chooses

    def attends(self) -> bool:
        return self.query_heads > 0

    def kv_elements(self) -> int:
        """Return the number of elements of K and V together for one token."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def chosen(self, stop: int) -> int:
        """Return how many tokens each query of a chunk that ends at `stop` chooses; 0 if it sees
        all."""
        return 0 if self.indexer is None or stop <= self.indexer.tokens else self.indexer.tokens

    def output_elements(self) -> int:
        """Return the number of elements of attention's output for one token."""
        return self.query_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a causal decoder, from which the planner computes memory and time."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    element_bytes: int  # of a parameter and an activation: 2, 4 or 8
    parameters: int = 0  # elements of all weights
    trainable: int = 0  # elements that receive a gradient
    routers: bool = False  # the loss has a part of its routers, which choose experts
    carried: int = 0  # elements of a token that layers pass on besides the hidden state
    # Elements of the inputs that layers get of a token, if cells make these of its id again.
    embeds: int = 0
    shares: bool = False  # layers share weights with one another

    def cut(self, loss: Objective) -> Cut:
        """Return what must be complete before a backward of this loss begins."""
        if loss.is_cut:
            return Cut.AFTER_HEAD
        return Cut.AFTER_LAYERS if self.routers else Cut.NONE

    def passed(self) -> int:
        """Return the number of elements of a token that a layer passes on to the next."""
        return self.hidden + self.carried

    def is_recurrent(self) -> bool:
        return any(layer.state for layer in self.layers)

    def outer(self) -> int:
        """Return the number of weights outside the layers: embedding, last norm, head."""
        return self.parameters - sum(layer.work.parameters for layer in self.layers)

    def outer_trainable(self) -> int:
        """Return the number of weights outside the layers that are trained."""
        return self.trainable - sum(layer.work.trainable for layer in self.layers)

    def accumulate_bytes(self) -> int:
        """Bytes per element of LSEs and sums of gradients: fp32, or fp64 in a float64 model."""
        return max(4, self.element_bytes)


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate measured for several sizes of a call: linear in log(size), constant beyond."""

    points: tuple[tuple[float, float], ...]  # (size, rate a second), sizes ascending

    def at(self, size: float) -> float:
        """Return the rate of a call of this size, interpolated between measured sizes."""
        index = bisect_right(self.points, size, key=itemgetter(0))
        if index == 0 or index == len(self.points):
            return self.points[max(0, index - 1)][1]
        (low, below), (high, above) = self.points[index - 1 : index + 1]
        part = math.log(size / low) / math.log(high / low)
        return below + part * (above - below)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured FLOP/s of one device in one dtype. Attention's curves are for heads of `head_dim`
    elements. The time of a softmax does not depend on the head's size, so it has its own fields."""

    matmul: Curve  # against the FLOP of one product
    attention_forward: Curve  # without a mask; against the FLOP of one head of one sequence
    attention_backward: Curve
    peak: float  # the datasheet's dense rate, the denominator of MFU
    weights: Curve | None = None  # products for dW, with x transposed; None: as `matmul`
    fp8: Curve | None = None  # a linear module's three products in FP8, with casts; None: unknown
    causal_forward: Curve | None = None  # of a causal square, hidden pairs not counted
    causal_backward: Curve | None = None  # None: as without a mask
    head_dim: int = 128
    # Seconds per query, key and head, besides the products. On an H100 0.38 ps explain why cuDNN's
    softmax_forward: float = 0.0  # forward reaches 413 TFLOP/s with heads of 64, 595 with 128
    softmax_backward: float = 0.0
    logit: float = 0.0  # seconds of a logit's cross-entropy and its gradient; 0: from its traffic
    # Bytes per query or key, head and element of an attention backward, besides its inputs and
    attention_workspace: float = 0.0  # results; 0: not known
    kernel: AttentionKernel | None = None  # the fastest, with these curves; None: not compared
    backward_kernel: AttentionKernel | None = None  # the fastest backward; None: `kernel`
    deterministic: float = 1.0  # factor on attention's time if it is deterministic
    # Attention to chosen pages, by its own kernels; None: as attention without a mask.
    chosen_forward: Curve | None = None
    chosen_backward: Curve | None = None
    votes: Curve | None = None  # for pages, in one kernel; None: a product that is written out

    def product(self, flop: float, *, weights: bool = False, fp8: bool = False) -> float:
        """Return the seconds that one matrix product takes."""
        curve = self.weights if weights and self.weights is not None else self.matmul
        if fp8 and self.fp8 is not None:
            curve = self.fp8
        return flop / curve.at(flop)

    def attention(
        self,
        pairs: float,
        layer: LayerSpec,
        *,
        rows: float = 1.0,
        causal: bool = False,
        backward: bool = False,
        chosen: bool = False,
    ) -> float:
        """Return the seconds of one attention call on `rows` sequences, each with `pairs` visible
        (query, key) pairs; with `chosen`, of a sparse attention call that reads chosen pages."""
        forwards = self.attention_forward, self.causal_forward, self.softmax_forward
        backwards = self.attention_backward, self.causal_backward, self.softmax_backward
        plain, square, softmax = backwards if backward else forwards
        pages = self.chosen_backward if backward else self.chosen_forward
        special = pages if chosen else square if causal else None
        curve = plain if special is None else special
        width = 2 * max(layer.head_dim, layer.value_dim)  # the narrower of the two is padded
        flop = 2.0 * pairs * width * (BACKWARD_PRODUCTS if backward else 1.0)
        narrower = 1.0 - width / (2 * self.head_dim)
        one_head = flop / curve.at(flop) + pairs * softmax * narrower
        return rows * layer.query_heads * one_head


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One node: `devices` equal devices that share its main memory."""

    name: str
    devices: int
    device_bytes: int  # of one device
    host_bytes: int  # of the node, without the system's share
    rates: dict[str, Rates]  # by dtype: bfloat16, float32, float64
    memory: float  # bytes a second that elementwise work reads and writes on the device
    fetch: float  # bytes a second host to device, of one device alone
    evict: float  # bytes a second device to host
    fetch_together: float  # the same while both directions run
    evict_together: float
    host_memory: float  # bytes a second of all devices' fetches and evicts together
    peer: float  # bytes a second one device sends to others of its node
    network: float  # bytes a second one device sends to other nodes
    latency: float  # seconds of a collective in addition to its bytes
    overhead: float  # seconds to issue a cell; overlaps with earlier cells, but not on a CPU
    reserve: int  # device bytes that no plan can use: context, libraries' workspaces
    unified: bool = False  # both tiers lie in one memory: `device_bytes` is not used
    processors: int = 0  # streaming multiprocessors of one device; 0: not known
    pinned: bool = True  # main memory can be locked for copies; else each copy blocks
    host_reserve: int = 0  # bytes besides `host_bytes`: for the system, processes, loading
    disk: float = 5e9  # bytes a second of a node's drive, reads and writes together; assumed

    @property
    def on_cpu(self) -> bool:
        """True if a CPU does the computing; a GPU may share main memory, too."""
        return self.unified and not self.processors


KEPT_CALLS = 2**14  # tokens: 8 MiB of rotary tables in bf16 for heads of 128


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The sizes of one step: batch and tokens."""

    batch: int
    tokens: int

    def __post_init__(self) -> None:
        for field in ("batch", "tokens"):
            if not _is_count(value := getattr(self, field)):
                raise UnsupportedError(
                    f"{field}: expected a whole number of at least 1, got {value!r}"
                )

    def keeps_calls(self) -> bool:
        """Return whether a step keeps what it calls layers with besides hidden states, such as
        rotary tables, for all chunks. Else it keeps those of one chunk, and makes them again."""
        return self.batch * self.tokens <= KEPT_CALLS


MEAN, SUBMEANS, INDEX = "mean", "submeans", "index"
SELECTORS = SUBMEANS, MEAN  # need only the model; `index` has an adapter
SUBMEAN = 2  # tokens whose mean key `submeans` compares
SUPERPAGE = 16  # pages that are ranked as one if there are many
SUPERMEAN = 4  # tokens whose mean key ranks them: with 8, one key is lost among random ones
# Pages compared after that, in multiples of a budget's pages. The best k pages lie in k superpages
# at most, but seldom in more than k / 2.
REFINED = 8


@dataclass(frozen=True, slots=True)
class Sparse:
    """Settings of page-sparse attention, an approximation of dense attention (OOMB 4.2).

    Page p is tokens [p * page, (p + 1) * page); a chunk begins on a page. Of the tokens that dense
    attention shows it, a query sees its own chunk, `recent` tokens before the chunk, the first
    `sinks` tokens, and pages that are chosen for its page of queries among all the others. If the
    budget covers everything between sinks and recent tokens, attention is dense.
    """

    page: int = 128  # tokens per page; divides `chunk` and `budget`
    budget: int = 8192  # tokens of chosen pages that a query sees; 0: only sinks and recent tokens
    recent: int = 4096  # tokens before the chunk that its queries see, rounded up to a page border
    sinks: int = 128  # first tokens of the sequence, seen by all, rounded up to a page border
    query_page: int = 16  # tokens that choose together, cut to a divisor of `page`
    selector: str = SUBMEANS  # how pages are compared: `submeans`, `mean` or `index`
    index_dim: int = 32  # dims of a key of `index`, at most those of the model's keys

    def __post_init__(self) -> None:
        for field in ("page", "budget", "recent", "sinks", "query_page"):
            value, least = getattr(self, field), int(field in ("page", "query_page"))
            if not _is_count(value, least):
                raise UnsupportedError(
                    f"{field}: expected a whole number of tokens >= {least}, got {value!r}"
                )
        if not _is_count(self.index_dim):
            raise UnsupportedError(
                f"index_dim: expected a whole number of at least 1, got {self.index_dim!r}"
            )
        if self.selector not in (*SELECTORS, INDEX):
            raise UnsupportedError(
                f"selector: expected one of {', '.join((*SELECTORS, INDEX))}, got {self.selector!r}"
            )
        if self.budget % self.page:
            below = self.budget // self.page * self.page
            raise UnsupportedError(
                f"budget: expected a multiple of page ({self.page} tokens), got {self.budget}; "
                f"make it {below} or {below + self.page}"
            )

    @property
    def query_tokens(self) -> int:
        """Number of tokens that choose pages together: `query_page`, cut to a divisor of `page`."""
        return math.gcd(self.query_page, self.page)

    @property
    def indexed(self) -> bool:
        """True if a learned index compares pages, instead of the model's own queries and keys."""
        return self.selector == INDEX

    @property
    def mean_tokens(self) -> int:
        """Tokens per mean key, from which pages get votes: a divisor of a page; 1 with an index."""
        if self.indexed:
            return 1
        return math.gcd(SUBMEAN, self.page) if self.selector == SUBMEANS else self.page

    def key_dim(self, layer: LayerSpec) -> int:
        """Return the dim of the queries and keys by which this layer's pages are compared."""
        return min(self.index_dim, layer.head_dim) if self.indexed else layer.head_dim

    @property
    def super_tokens(self) -> int:
        """Number of tokens per mean key for ranking superpages (16 candidate pages each)."""
        return math.gcd(SUPERMEAN, self.page)

    def refined(self, candidates: int) -> int:
        """Return how many superpages (16 pages each) a page of queries keeps after ranking them;
        only pages in these are compared. 0 means no ranking: it must drop at least half of the
        `candidates`."""
        kept = -(-REFINED * (self.budget // self.page) // SUPERPAGE)
        pays = self.super_tokens > self.mean_tokens and self.selector != MEAN
        return kept if pays and candidates >= 2 * SUPERPAGE * kept else 0

    def compared(self, candidates: int) -> tuple[int, int]:
        """Return two numbers of mean keys with which each query is compared: to choose among
        `candidates` pages and, before that, to rank superpages (16 pages each)."""
        refined = SUPERPAGE * self.refined(candidates)
        means = (refined or candidates) * self.page // self.mean_tokens
        return means, bool(refined) * candidates * self.page // self.super_tokens

    @property
    def sink_pages(self) -> int:
        """Number of pages at the beginning of the sequence that all queries see."""
        return -(-self.sinks // self.page)

    def whole_pages(self, tokens: int) -> int:
        """Return a number of tokens rounded up to whole pages."""
        return -(-tokens // self.page) * self.page

    def check_chunk(self, chunk: int) -> None:
        """Raise UnsupportedError unless a chunk of this size is a whole number of pages."""
        above = self.whole_pages(chunk)
        if chunk != above:
            raise UnsupportedError(
                f"chunk: expected a multiple of page ({self.page} tokens) with sparse attention, "
                f"got {chunk}; make it {above}, or choose a page that divides it"
            )

    def near_start(self, q_start: int) -> int:
        """Return the first recent token (start of a page) that the chunk at `q_start` sees."""
        return max(0, q_start - self.recent) // self.page * self.page

    def candidates(self, q_start: int) -> range:
        """Return the numbers of the pages among which a chunk that begins at `q_start` chooses."""
        stop = self.near_start(q_start) // self.page
        return range(min(self.sink_pages, stop), stop)

    def width(self, q_start: int) -> int:
        """Return the most pages that a page of queries in the chunk at `q_start` can choose."""
        return min(self.budget // self.page, len(self.candidates(q_start)))

    def choosing(self, chunks: Sequence[tuple[int, int]]) -> range:
        """Return which of the chunks, token ranges in order, have pages to choose from."""
        first = bisect_left(chunks, 1, key=lambda chunk: self.width(chunk[0]))
        return range(first, len(chunks))

    def near(self, q_start: int) -> int:
        """Number of tokens before the chunk at `q_start` that all queries see: sinks and recent."""
        return q_start - len(self.candidates(q_start)) * self.page

    def reach(self, q_start: int) -> int:
        """Return the most tokens before the chunk at `q_start` that one query sees."""
        return self.near(q_start) + self.width(q_start) * self.page

    def hides(self, tokens: int, chunk: int) -> bool:
        """Return whether, with chunks of `chunk` tokens, some of the first `tokens` queries may
        miss a token that dense attention shows. False holds for any documents if the pages with
        most votes are chosen; other selectors may choose fewer than the budget allows."""
        last = (tokens - 1) // chunk * chunk  # no chunk has more candidates
        return self.reach(last) < last


@dataclass(frozen=True, slots=True)
class Schedule:
    """Plan of a step: the order of its cells, and the memory in which each tensor lives.

    All schedules give the same gradients; they differ in memory and time. The exception is
    `sparse`, which approximates: all schedules with the same chunk and `sparse` give the same
    gradients. Fractions keep the latest tokens first and are rounded to whole chunks.
    """

    chunk: int = 16384  # tokens per chunk; the last one may be shorter (OOMB 4.1, FPDT 4.1)
    groups: int | tuple[int, ...] = 1  # layers per group, or the size of each group in order
    boundary_inputs: Tier = Tier.HOST  # where layer inputs at the borders of groups wait
    kv: Tier = Tier.DEVICE  # where K, V, dK, dV of the open group live; host streams blocks
    kv_kept: bool = False  # keep K, V of closed groups for their backward, which then rebuilds none
    kv_home: Tier = Tier.HOST  # where kept K, V wait if `kv` is device
    attention_save_fraction: float = 0.0  # share of the tokens, latest first, that keep O and LSE
    attention_open: bool = False  # keep O and LSE of the open group while it is rebuilt
    attention: Tier = Tier.HOST  # where kept O and LSE live
    activation_save_fraction: float = 0.0  # share of the tokens that keep other activations
    activation_save_layers: float = 1.0  # share of the groups of layers that keep them, evenly
    activations: Tier = Tier.HOST  # where kept activations live (MEMO 4.1)
    layer_checkpoint: bool = False  # the backward holds one layer's activations, not one group's
    kv_block: int = 16384  # most keys that one attention call sees, on a fixed grid
    loss_chunk_size: int = 1024  # tokens whose logits exist at one time
    mlp_chunk_size: int | None = None  # tokens whose MLP activations exist at once; null: a chunk
    alltoall_splits: int = 2  # pieces in which ranks exchange heads; one travels while one is used
    sparse: Sparse | None = None  # approximate attention in layers without a window; None: exact
    weights: Tier = Tier.DEVICE  # where weights and gradients live; host: two groups on the device

    def __post_init__(self) -> None:
        for field in ("chunk", "kv_block", "loss_chunk_size", "mlp_chunk_size"):
            value = getattr(self, field)
            if not _is_count(value) and (field, value) != ("mlp_chunk_size", None):
                raise UnsupportedError(
                    f"{field}: expected a whole number of tokens >= 1, got {value!r}"
                )
        if not _is_count(pieces := self.alltoall_splits):
            raise UnsupportedError(f"alltoall_splits: expected a whole number >= 1, got {pieces!r}")
        for field in (
            "attention_save_fraction",
            "activation_save_fraction",
            "activation_save_layers",
        ):
            value = getattr(self, field)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0.0 <= value <= 1.0:
                raise UnsupportedError(
                    f"{field}: expected a fraction between 0 and 1, got {value!r}"
                )
        for field in ("boundary_inputs", "kv", "kv_home", "attention", "activations", "weights"):
            if getattr(self, field) not in tuple(Tier):
                raise UnsupportedError(
                    f"{field}: expected 'device' or 'host', got {getattr(self, field)!r}"
                )
            object.__setattr__(self, field, Tier(getattr(self, field)))
        for field in ("kv_kept", "attention_open", "layer_checkpoint"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise UnsupportedError(f"{field}: expected true or false, got {value!r}")
        self._check_groups()
        if self.sparse is not None:
            if not isinstance(self.sparse, Sparse):
                raise UnsupportedError(
                    f"sparse: expected a farspan.Sparse or None, got {self.sparse!r}"
                )
            self.sparse.check_chunk(self.chunk)

    def _check_groups(self) -> None:
        sizes = self.groups if isinstance(self.groups, tuple | list) else (self.groups,)
        if not sizes or not all(_is_count(size) for size in sizes):
            raise UnsupportedError(
                "groups: expected the number of layers per group (a whole number >= 1) or a list "
                f"of group sizes, got {self.groups!r}"
            )
        if not isinstance(self.groups, int):
            object.__setattr__(self, "groups", tuple(sizes))

    def with_sparse(self, sparse: Sparse | None) -> "Schedule":
        """Return the schedule with this attention, and its chunk rounded up to whole pages."""
        chunk = self.chunk if sparse is None else sparse.whole_pages(self.chunk)
        return replace(self, chunk=chunk, sparse=sparse)

    def group_sizes(self, layers: int) -> tuple[int, ...]:
        """Return the layers per group, in order. Raises UnsupportedError if their sum is wrong."""
        if isinstance(self.groups, tuple):
            if sum(self.groups) != layers:
                raise UnsupportedError(
                    f"groups: {list(self.groups)} holds {sum(self.groups)} layers, but the model "
                    f"has {layers}; give sizes that add up to {layers}"
                )
            return self.groups
        size = min(self.groups, layers)
        full, rest = divmod(layers, size)
        return (rest,) * bool(rest) + (size,) * full


ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
SHORT_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def dtype_name(dtype: str) -> str:
    """Return torch's name of a dtype to train in. Raises UnsupportedError for other dtypes."""
    name = SHORT_NAMES.get(dtype.lower(), dtype.lower())
    if name not in ELEMENT_BYTES:
        raise UnsupportedError(
            f"dtype: expected one of {', '.join((*ELEMENT_BYTES, *SHORT_NAMES))}, got {dtype!r}; "
            "for frozen four-bit weights, give quantize nf4 with lora"
        )
    return name
