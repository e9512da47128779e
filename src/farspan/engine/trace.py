"""Record every malloc and free of torch's allocator, from tensors that have no memory.

On the meta device an operation makes its outputs and computes nothing, so a step of any size runs
in seconds. A storage is born with the operation whose output first lies in it, and dies with the
last tensor, view or autograd node that refers to it: when CPython drops its wrapper, which torch
keeps for as long as the storage lives. `meta_model` makes models with shapes and no weights.

Note: [Autograd adds in place]. When a second gradient arrives for a tensor, autograd adds it into
the first if nothing else holds that; but never if a dispatch mode or a meta tensor makes tensors
"subclass like". So the recorder, which is such a mode, makes the addition in place itself, by the
rule of torch's InputBuffer (sole owner, dense, no graph of this sum). It tells this addition from
one in a custom backward by its references: a caller in Python holds one more.

Note: [Order within an operation]. Outputs are born first, in their order, then the blocks that the
kernel allocates and frees internally (`Temporaries`).

Temporaries are those of torch 2.11 to 2.13 and its FlashAttention 2; each can be switched off by
its name. Some are not recorded, since they depend on the data or on a library's version: partial
sums of the embedding's backward, scratch space of cub, and kernels that choose another algorithm
for other sizes.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from farspan.hf.compiled import UncompiledMode
from farspan.hf.stages import CausalLMStages
from farspan.hf.swap import put
from farspan.host import MIB
from farspan.spec import UnsupportedError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Malloc:
    """An allocation, in bytes as requested, before rounding."""

    tensor: int
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class FreeEvent:
    """Deallocation of a tensor's memory."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Event that begins a named section of a trace, such as "layer 3 forward" or "step 2"."""

    name: str


Event = Malloc | FreeEvent | Mark


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a program to its memory allocator, in order."""

    events: tuple[Event, ...]
    name: str


CUBLAS_WORKSPACE = 32 * MIB  # on Hopper and newer; 8.1 MiB before. One per thread and stream
FLASH_ROWS = 128  # FlashAttention rounds lengths up to a multiple
FLASH_HEAD_DIM = 32  # and head sizes


class Temporary(StrEnum):
    """A kind of memory that kernels allocate internally, which no dispatch mode sees."""

    CUBLAS = "cublas"  # workspace allocated at the first product of each thread, never freed
    FLASH = "flash"  # the backward: fp32 dQ, row sums, dK and dV of every query head
    EMBEDDING = "embedding"  # the backward: sorted indices, and their positions


PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
FLASH_BACKWARD = frozenset(
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._flash_attention_backward.default,
    )
)
EMBEDDING_BACKWARD = aten.embedding_dense_backward.default
SORTED = 3072  # at most this many tokens are added one by one, without sorting


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Kinds of kernels' internal memory to record."""

    kinds: frozenset[Temporary]

    def workspace(self, func: Any) -> int:
        """Return the bytes that `func` allocates for good when a thread first calls it."""
        return CUBLAS_WORKSPACE if Temporary.CUBLAS in self.kinds and func in PRODUCTS else 0

    def within(self, func: Any, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the bytes of each block that a kernel allocates internally, and then frees."""
        if func in FLASH_BACKWARD and Temporary.FLASH in self.kinds:
            return tuple(_flash_backward(func, args))
        if func is EMBEDDING_BACKWARD and Temporary.EMBEDDING in self.kinds:
            indices = args[1]
            return (indices.nbytes,) * 2 if indices.numel() > SORTED else ()
        return ()


NO_TEMPORARIES, ALL_TEMPORARIES = Temporaries(frozenset()), Temporaries(frozenset(Temporary))


def _flash_backward(func: Any, args: Sequence[Any]) -> Iterator[int]:
    """Yield the bytes of each block that a flash attention backward allocates internally. `func`
    takes dout, q, k first; if it is SDPA's, these have heads before tokens."""
    q: Tensor = args[1]
    k: Tensor = args[2]
    heads_first = func is not aten._flash_attention_backward.default
    batch, head_dim = q.shape[0], q.shape[3]
    heads, tokens = (q.shape[1], q.shape[2]) if heads_first else (q.shape[2], q.shape[1])
    kv_heads, keys = (k.shape[1], k.shape[2]) if heads_first else (k.shape[2], k.shape[1])
    rows = -(-tokens // FLASH_ROWS) * FLASH_ROWS
    yield batch * heads * rows * 4  # rowsum(dO * O)
    yield batch * rows * heads * (-(-head_dim // FLASH_HEAD_DIM) * FLASH_HEAD_DIM) * 4  # dQ
    if kv_heads != heads:
        yield batch * keys * heads * head_dim * q.element_size()  # dK
        yield batch * keys * heads * head_dim * q.element_size()  # dV


ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


class _Death(weakref.ref[Any]):
    """Weak reference to a storage; `tensor` is its number in the trace, None if not recorded."""

    __slots__ = ("key", "tensor")
    key: int
    tensor: int | None


class Recorder(UncompiledMode):
    """Recorder of the storages created on one device inside the context, and of their release.
    Invariant: `_alive` has one entry for each known storage that still exists."""

    def __init__(
        self, device: torch.device, temporaries: Temporaries = NO_TEMPORARIES, *, in_place: bool
    ):
        """Record on one device. With `in_place`, add gradients in place, as autograd does without a
        dispatch mode; see the Note."""
        super().__init__()
        self.device = device.type
        self.events: list[Event] = []
        self.lasting: set[int] = set()  # tensors outside steps: weights, moments
        self._temporaries = temporaries
        self._in_place = in_place
        self._references = _engine_references()
        self._alive: dict[int, _Death] = {}
        self._next = 0
        self._handles: set[bool] = set()  # threads that have a cuBLAS workspace

    def mark(self, name: str) -> None:
        """Begin a section of the trace with this name."""
        self.events.append(Mark(name))

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors that exist already as if allocated now, outside any step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage.nbytes():
                self.lasting.add(self._born(storage))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Treat a step's tensors that outlive it, such as optimizer states, as outside any step."""
        for tensor in tensors:
            death = self._alive.get(tensor.untyped_storage()._cdata)
            if death is not None and death.tensor is not None:
                self.lasting.add(death.tensor)

    def trace(self, name: str, *, lasting: bool = True) -> Trace:
        """Return the trace so far; without `lasting`, it omits tensors outside any step."""
        left_out: set[int] = set() if lasting else self.lasting
        kept = (e for e in self.events if isinstance(e, Mark) or e.tensor not in left_out)
        return Trace(tuple(kept), name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD and self._in_place and self._accumulates(args):
            func = ADD_IN_PLACE
        out = result_of(func, args, kwargs or {})
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self._meet(one, args)
        if self._temporaries.kinds:
            self._borrow(func, args)
        return out

    def _accumulates(self, args: Sequence[Any]) -> bool:
        """Return whether this operation is autograd's addition of two gradients, which it would
        make in place (see the Note)."""
        return (
            not torch.is_grad_enabled()
            and in_backward()
            and sys.getrefcount(args[0]) == self._references
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and _is_sole_dense(args[0])
        )

    def _meet(self, tensor: Tensor, args: Sequence[Any]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive or tensor.device.type != self.device:
            return
        if _is_of(storage._cdata, args):
            self._watch(storage, None)  # a view of a storage from before the recording
        elif storage.nbytes():
            self._born(storage)

    def _born(self, storage: Any) -> int:
        tensor = self._malloc(storage.nbytes())
        self._watch(storage, tensor)
        return tensor

    def _malloc(self, size: int) -> int:
        tensor, self._next = self._next, self._next + 1
        self.events.append(Malloc(tensor, size))
        return tensor

    def _watch(self, storage: Any, tensor: int | None) -> None:
        death = _Death(storage, self._dies)
        death.key, death.tensor = storage._cdata, tensor
        self._alive[death.key] = death

    def _dies(self, death: _Death) -> None:
        del self._alive[death.key]
        if death.tensor is not None:
            self.events.append(FreeEvent(death.tensor))

    def _borrow(self, func: Any, args: Sequence[Any]) -> None:
        """Record memory that a kernel allocates internally, and a thread's first workspace."""
        thread = in_backward()  # autograd runs on its own thread, with its own handles
        workspace = self._temporaries.workspace(func)
        if workspace and thread not in self._handles:
            self._handles.add(thread)
            self.lasting.add(self._malloc(workspace))
        taken = [self._malloc(size) for size in self._temporaries.within(func, args)]
        self.events.extend(map(FreeEvent, reversed(taken)))


# Shape, strides and dtype of results on the meta device, by the inputs they depend on.
_RESULTS: dict[tuple[Any, ...], tuple[Any, ...]] = {}
MOST_RESULTS = 1 << 16
COPY = torch.ops.aten._to_copy.default  # autograd moves one number of DiffLlama to the CPU


def result_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return an operation's result; on the meta device, its sizes come from a cache if possible."""
    if func is COPY and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    key: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    if not _returns_new(func) or not _describe((*args, *kwargs.values()), key):
        return func(*args, **kwargs)
    # torch 2.13 runs most meta operations in Python, in 0.2 ms; a cached result takes a tenth.
    known = _RESULTS.get(tuple(key))
    if known is not None:
        return _blank(*known)
    out = func(*args, **kwargs)
    made = out.shape, out.stride(), out.dtype
    storage = out.untyped_storage()
    apart = out.is_meta and not _is_of(storage._cdata, args)
    if apart and storage.nbytes() == _blank(*made).nbytes:
        if len(_RESULTS) == MOST_RESULTS:
            _RESULTS.clear()
        _RESULTS[tuple(key)] = made
    return out


def _blank(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@cache
def _returns_new(func: Any) -> bool:
    """Return whether an aten operation returns one new tensor and changes no argument."""
    schema = func._schema
    returned = [(str(one.type), one.alias_info) for one in schema.returns]
    return (func.namespace, schema.is_mutable, returned) == ("aten", False, [("Tensor", None)])


def _describe(values: Iterable[Any], key: list[Any]) -> bool:
    """Append to `key` what decides a meta operation's result; False if a tensor has data."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return False
            key += value.shape, value.stride(), value.dtype
        elif isinstance(value, list | tuple):
            key.append(len(value))
            if not _describe(value, key):
                return False
        else:
            key += type(value), value
    return True


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_of(key: int, args: Sequence[Any]) -> bool:
    """Return whether a storage belongs to one of the arguments of an operation."""
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.untyped_storage()._cdata == key:
                return True
        elif isinstance(arg, list | tuple) and _is_of(key, arg):
            return True
    return False


def _is_sole_dense(tensor: Tensor) -> bool:
    """Return whether a tensor alone uses its storage, and its elements have no gaps."""
    key = tensor.untyped_storage()._cdata
    # One reference is the tensor's, the other the storage wrapper's.
    sole = torch._C._storage_Use_Count(key) == 2
    return sole and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class _Count(UncompiledMode):
    """Dispatch mode that counts references to the first argument of autograd's additions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD and in_backward():
            self.found.add(sys.getrefcount(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _engine_references() -> int:
    """Return the number of references to the first summand when autograd adds two gradients: with
    these alone it adds in place. Measured, as it depends on the versions of CPython and torch."""
    x = torch.empty(1, device="meta", requires_grad=True)
    with _Count() as count, torch.enable_grad():
        torch.autograd.grad(x.sin() * x.cos(), x)
    (found,) = count.found
    return found


LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # in configurations, the usual one first
EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # fields with one entry per layer


def shortened(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return a configuration with its first layers only; None: all. Raises UnsupportedError."""
    if layers is None:
        return config
    name = next((name for name in LAYERS if name in config), LAYERS[0])
    known = config.get(name, layers)
    if not 1 <= layers <= known:
        raise UnsupportedError(f"layers: expected 1 to {known} of this model, got {layers}")
    cut = {field: config[field][:layers] for field in EACH_LAYER if config.get(field)}
    return {**config, **cut, name: layers}


class _NoValues(UncompiledMode):
    """Dispatch mode that skips drawing random initial weights, which meta tensors do not keep."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            # 65B elements take 720 such calls.
            torch.Tag.nondeterministic_seeded in func.tags
            and func.overloadpacket.__name__[-1] == "_"
        ):
            return args[0]
        return func(*args, **(kwargs or {}))


def meta_model(config: dict[str, Any], dtype: torch.dtype, rank: int = 0) -> PreTrainedModel:
    """Return the causal LM of a configuration on the meta device, in training mode, with LoRA
    adapters if `rank` is above 0. Raises UnsupportedError if transformers cannot make it."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    try:
        with torch.device("meta"), _NoValues():
            made = AutoConfig.for_model(str(config.get("model_type")), **fields)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=dtype)
    except Exception as error:  # any error of the family's own code
        raise UnsupportedError(
            f"model: transformers cannot build this configuration: {type(error).__name__}: {error}"
        ) from error
    if rank:
        add_adapters(model, rank)
    return model.train()


# -- adapters ----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear module with a LoRA adapter: W x + scale * B(A(x)).

    The operations are those of PEFT's layer for adapters in the model's dtype and no dropout.
    """

    def __init__(self, base: nn.Module, rank: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        weight: Any = base.weight
        inner, outer = sizes
        self.base, self.scale = base, 1.0
        options: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.a = nn.Linear(inner, rank, **options)
        self.b = nn.Linear(rank, outer, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.b(self.a(x)) * self.scale


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Freeze the model, and give every linear module of its layers a LoRA adapter."""
    model.requires_grad_(False)
    found = [
        (parent, name, child)
        for layer in CausalLMStages(model).layers
        for parent in layer.modules()
        for name, child in parent.named_children()
    ]
    for parent, name, child in found:
        sizes = _sizes(child)
        if sizes is not None:
            put([(parent._modules, name, Adapted(child, rank, sizes))])


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # transformers' linear with its weight transposed
        weight: Any = module.weight
        return weight.shape[0], weight.shape[1]
    return None


# -- attention ---------------------------------------------------------------------------------


def flash_attention(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
) -> Tensor:
    """Compute a layer's attention by the operation that scaled_dot_product_attention runs on a GPU;
    return [B, C, H, D]. Windows and soft caps change no size, so the operation does not get them.
    Raises UnsupportedError for attention that flash attention cannot run."""
    _refuse(q, v, keywords)
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    out: Tensor = found[0]
    return out.transpose(1, 2)


def _refuse(q: Tensor, v: Tensor, keywords: dict[str, Any]) -> None:
    if keywords.get("s_aux") is not None:
        raise UnsupportedError(
            "model: its attention has sinks, which torch's flash attention does not support"
        )
    if q.shape[-1] != v.shape[-1]:
        raise UnsupportedError(
            f"model: its values are {v.shape[-1]} wide and its keys {q.shape[-1]}; flash attention "
            "needs both of the same width"
        )


@contextmanager
def refuse_value_dependence() -> Iterator[None]:
    """Raise UnsupportedError if the body reads values, which meta tensors do not have."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(
            "model: its step depends on values (routed experts, positions that change with the "
            f"length), which a trace lacks: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
