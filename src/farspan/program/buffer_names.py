"""Names of buffers. A slot is a buffer that lives for the whole program, for any layer or chunk.

Slots form rings, whose members are used in turn: while one is in use, the next is filled or the
last one is emptied.
"""

X_IN = ("x.in.0", "x.in.1")  # a group's input, then the gradient that replaces it
X_OUT = ("x.out.0", "x.out.1")  # a group's output, or its gradient in the backward
KV_OWN = ("kv.own.0", "kv.own.1")  # the chunk's own K, V on their way to or from host
DKV_OWN = ("dkv.own.0", "dkv.own.1")
KV_BLOCKS = ("kv.block.0", "kv.block.1")  # blocks of the prefix streamed from host (FPDT 4.2)
DKV_BLOCKS = ("dkv.block.0", "dkv.block.1")  # read, added to and written back by one instruction
PAGES = ("pages.slot.0", "pages.slot.1")  # chosen pages gathered from host (OOMB 4.2)
WEIGHTS = ("weights.slot.0", "weights.slot.1")  # of groups with even and with odd numbers
WEIGHTS_OUTER = "weights.outer"  # of the modules outside the layers, for the whole program
WEIGHT_GRADIENTS = ("weight_gradients.slot.0", "weight_gradients.slot.1")
WEIGHT_GRADIENTS_OUTER = "weight_gradients.outer"
ACTIVATIONS = ("activations.slot.0", "activations.slot.1")  # rounding buffers (MEMO 4.1)


def x(boundary: int) -> str:
    return f"x.{boundary}"


def kv(layer: int) -> str:
    return f"kv.{layer}"


def kv_again(layer: int) -> str:
    """Return the name of the buffer of K, V fetched or computed again for a layer's backward."""
    return f"kv.{layer}.again"


def kv_home(layer: int) -> str:
    """Return the name of the host buffer that saves a layer's K, V for its backward."""
    return f"kv.{layer}.home"


def dkv(layer: int) -> str:
    return f"dkv.{layer}"


def attention(layer: int) -> str:
    return f"attention.{layer}"


def attention_open(layer: int) -> str:
    """Return the name of the buffer of a layer's O, LSE that is freed when its group closes."""
    return f"attention.{layer}.open"


def attention_slots(widest: int) -> tuple[str, ...]:
    """Return the names of `widest` + 1 device buffers for O, LSE, used in turn: a chunk's graphs
    keep one per layer of its group (at most `widest`) in use, so the next chunk needs one more."""
    return tuple(f"attention.slot.{place}" for place in range(widest + 1))


def activations(layer: int) -> str:
    return f"activations.{layer}"


def means(layer: int) -> str:
    """Return the name of the buffer of a layer's mean keys, by which pages are chosen."""
    return f"means.{layer}"


def choice(layer: int) -> str:
    return f"choice.{layer}"
