"""FlashAttention-3 behind PyTorch's own flash attention ops, while a step runs.

PyTorch registers the kernels of the package `flash_attn_interface` under the aten names that
`backends.CudaFlash` calls. That holds for the whole process, so it is undone afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torch.nn import attention

from farspan.spec import Refused

NAME, PACKAGE = "FA3", "flash_attn_interface"


def refuse_missing() -> None:
    """Raises Refused where FlashAttention-3 could not be used."""
    known = getattr(attention, "list_flash_attention_impls", list)
    if NAME not in known():
        raise Refused("attention: fa3 needs PyTorch 2.11 or later; choose auto or flash")
    if not _is_there():
        raise Refused(
            f"attention: fa3 needs the package {PACKAGE} (FlashAttention-3, built from its sources "
            "for a Hopper GPU), which is not installed; install it, or choose auto or flash"
        )


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """Inside it aten's flash attention is FlashAttention-3. Raises Refused where its package is
    not what PyTorch expects."""
    before = attention.current_flash_attention_impl()
    if before == NAME:
        yield
        return
    try:
        attention.activate_flash_attention_impl(NAME)
    except (ImportError, RuntimeError, OSError) as error:
        raise Refused(f"attention: fa3 cannot be loaded: {error}; choose auto or flash") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)
        if before is not None:
            attention.activate_flash_attention_impl(before)


def _is_there() -> bool:
    try:
        return find_spec(PACKAGE) is not None
    except ValueError:  # a name that was imported without a file
        return False
