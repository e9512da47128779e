"""Names of buffers. A slot serves any layer or chunk and lives for the whole program."""

KV_OWN = "kv.own"  # the chunk's own K, V on their way to or from host
DKV_OWN = "dkv.own"
KV_BLOCKS = ("kv.block.0", "kv.block.1")  # blocks of the prefix streamed from host (FPDT 4.2)
DKV_BLOCK = "dkv.block"  # read, added to and written back within one instruction


def x(boundary: int) -> str:
    return f"x.{boundary}"


def x_in(chunk: int) -> str:
    """Slot of a group's input; two, so that the next chunk's fetch need not wait."""
    return f"x.in.{chunk % 2}"


def x_out(chunk: int) -> str:
    """Slot of a group's output, or of the gradient that comes back."""
    return f"x.out.{chunk % 2}"


def kv(layer: int) -> str:
    return f"kv.{layer}"


def kv_again(layer: int) -> str:
    """K, V of a layer that are back on the device for its backward."""
    return f"kv.{layer}.again"


def kv_home(layer: int) -> str:
    """Kept K, V of a closed layer, on host."""
    return f"kv.{layer}.home"


def dkv(layer: int) -> str:
    return f"dkv.{layer}"


def attention(layer: int) -> str:
    return f"attention.{layer}"


def attention_open(layer: int) -> str:
    """O, LSE kept only while the layer's group is open."""
    return f"attention.{layer}.open"


def attention_slot(place: int) -> str:
    """Slot of O, LSE of the layer at this place in its group."""
    return f"attention.slot.{place}"


def activations(layer: int) -> str:
    return f"activations.{layer}"


def activations_slot(layer: int) -> str:
    """Rounding buffer (MEMO 4.1): two, taken in turn by the layers."""
    return f"activations.slot.{layer % 2}"
