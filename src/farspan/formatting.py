"""Values as people read and write them: tokens, bytes, seconds, sparse attention, names.

K, M, G and T are powers of 1024: for tokens as in papers, whose 128K is 131,072; for bytes they
mean KiB to TiB. KB to TB are powers of 1000, and so is an exponent: `1e6` is a million.
"""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from farspan.spec import Sparse, UnsupportedError

TOKEN_UNITS = {"": 1} | {prefix: 1024**power for power, prefix in enumerate("kmgt", 1)}
BYTE_UNITS = {**TOKEN_UNITS, "b": 1} | {
    f"{prefix}{base}": factor**power
    for power, prefix in enumerate("kmgt", 1)
    for base, factor in (("ib", 1024), ("b", 1000))
}
TIME_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
MOST_TOKENS = 2**30  # most tokens of any count: longer steps have too many blocks to plan
LEAST_MEMORY = 2**20  # least bytes of a memory that may be written without a unit
FEW = 3  # most names of a list in an error
SHOWN = 200  # most characters of a value in an error
COLUMNS = 80  # width of the narrowest supported terminal
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)")
_OPTION = r"--[a-z-]+(?: [^\s-]\S*)?"
# Text that stays on one line: a size, and text to paste: a command, or options alone.
_PASTED = re.compile(
    r"\d [KMGT]iB|torchrun .*?farspan train [^\s,]+|"
    rf"(?:farspan [a-z-]+(?: [^\s-]*[/.][^\s,;]+)?|{_OPTION})(?: {_OPTION})*"
)
_WRITTEN = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([a-z]*?)(?:\s*(?:tokens|bytes))?")


def read_tokens(value: str | int, name: str) -> int:
    """Parse tokens such as 131072, 128K or 1e6. Raises UnsupportedError naming the option."""
    return _read(value, name, TOKEN_UNITS, "tokens such as 131072, 128K or 1M")


def read_bytes(value: str | int, name: str) -> int:
    """Parse bytes such as 80GB, 128GiB or 128G. Raises UnsupportedError naming the option."""
    return _read(value, name, BYTE_UNITS, "bytes such as 128GiB (2**30) or 80GB (10**9)")


def read_memory(value: str | int, name: str) -> int:
    """Parse a memory's bytes. A small number without unit, such as 24 (for GiB), is refused."""
    size = read_bytes(value, name)
    bare = str(value).strip()
    if bare.isdecimal() and size < LEAST_MEMORY:
        raise UnsupportedError(f"{name}: {bare} has no unit and means bytes; write {bare}GiB")
    return size


def read_seconds(value: str | float, name: str) -> float:
    """Parse seconds such as 90, 30m or 1.5h. Raises UnsupportedError naming the option."""
    match = _TIME.fullmatch(str(value).strip().lower())
    seconds = float(match[1]) * TIME_UNITS[match[2]] if match else 0.0
    if not seconds:
        raise UnsupportedError(
            f"{name}: expected a time above 0 such as 90s, 30m or 1.5h, got {value!r}"
        )
    return seconds


def _read(value: str | int, name: str, units: dict[str, int], expected: str) -> int:
    refused = UnsupportedError(f"{name}: expected {expected}, at least 1, got {value!r}")
    if isinstance(value, int) and not isinstance(value, bool):
        amount = Fraction(value)
    else:
        match = _WRITTEN.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        if match is None or match[2] not in units:
            if match is not None and match[2] in BYTE_UNITS:  # a count of tokens
                size = f"{match[1]}{match[2][0].upper()}"
                raise UnsupportedError(f"{refused}, which are bytes; give {size}")
            raise refused
        amount = Fraction(re.sub("[_,]", "", match[1])) * units[match[2]]
    # 131.7 GiB is not a whole number of bytes; a token cannot be divided.
    if amount < 1 or (amount.denominator != 1 and units is TOKEN_UNITS):
        raise refused
    if amount > MOST_TOKENS and units is TOKEN_UNITS:
        raise UnsupportedError(
            f"{name}: {shortened(value)} tokens are more than the limit of {MOST_TOKENS:,} (1G); "
            "give fewer"
        )
    return int(amount)


def shortened(value: object, most: int = SHOWN) -> str:
    """Return a value as text for an error, cut to its first `most` characters."""
    text = value if isinstance(value, str) else f"{value!r}"
    return text if len(text) <= most else f"{text[:most]}..."


def some(names: Sequence[str], where: str = "farspan plan --help") -> str:
    """Return the first few of many names as text, and say where the user finds all."""
    return f"{', '.join(names[:FEW])} and {len(names) - FEW} more ({where})"


def without_home(text: str) -> str:
    """Return text in which `~` replaces the home folder in paths."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![^/\s'\"])", "~", text)


def write_tokens(tokens: int) -> str:
    """Format tokens as `128K` or `1M` if that is exact, else with commas at thousands."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if tokens and tokens % factor == 0:
            return f"{tokens // factor:,}{unit}"
    return f"{tokens:,}"


def write_number(count: int, noun: str) -> str:
    """Format a count with its noun: `1 sequence`, `2,048 sequences`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def write_bytes(size: float) -> str:
    """Format bytes with about three digits, in the largest binary unit not above the size."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"


def write_count(amount: float, unit: str) -> str:
    """Format a count with three digits and a decimal prefix, such as `1.05 TFLOP`."""
    for prefix in ("", "K", "M", "G", "T"):
        if abs(amount) < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:,.3g} P{unit}"


def write_most(fraction: float) -> str:
    """Format a fraction as a percentage of one decimal, rounded up: an upper bound, never 0.0%."""
    # 0.031 * 1000 may be the next float above 31.
    return f"{ceil(round(1000 * fraction, 6)) / 10 or 0.1:.1f}%"


def write_seconds(seconds: float) -> str:
    """Format seconds, as minutes or hours for long times."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def fold(text: str, columns: int | None = None, indent: str = "  ") -> list[str]:
    """Wrap text to `columns`, by default those of the terminal, and indent all lines but the first.
    A command to paste stays on one line, or continues after a backslash."""
    width = columns or max(COLUMNS, shutil.get_terminal_size().columns)
    wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    glued = _PASTED.sub(lambda found: found[0].replace(" ", "\0"), text)
    folded: list[str] = []
    for line in wrap(glued, width, subsequent_indent=indent):
        whole = line.replace("\0", " ")
        parts = [whole]
        if len(whole) > width:
            parts = wrap(whole, width - 2, subsequent_indent="    ")
        folded += [*(f"{part} \\" for part in parts[:-1]), parts[-1]]
    return folded


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)`, with the known word X nearest to `word`, or an empty text."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""


# Other names of places and optimizers, in small letters and digits.
_CALLED = {
    **dict.fromkeys(("cpu", "ram"), "host"),
    **dict.fromkeys(("gpu", "cuda"), "device"),
    **dict.fromkeys(("nvme", "ssd"), "disk"),
    **dict.fromkeys(("adamw8bit", "adamwbnb8bit", "bnbadamw8bit"), "adamw8bit"),
    **dict.fromkeys(("adamw", "adamwtorch", "adamwtorchfused", "adamwfused"), "adamw"),
}


def as_meant(word: str) -> str:
    """Return a word in lower case, or farspan's name for what other tools call by this word."""
    small = word.strip().lower()
    return _CALLED.get("".join(filter(str.isalnum, small)), small)


ON, OFF = "on", "off"
FIELDS = tuple(field.name for field in fields(Sparse))
EXAMPLE = "page=64,budget=2K,recent=1K,sinks=64"
# Of linear products of layers (`Kernels.products`).
IN_FP8 = "linear products of layers in fp8, approximate: e4m3 operands with a scale a row"
SEES_ALL = "which hides no token at this context and equals dense attention"


def read_sparse(text: str) -> Sparse | None:
    """Parse the settings of sparse attention: `on` (the defaults), `off` (None), or fields to
    change such as `page=64,budget=2K`. Raises UnsupportedError naming the field."""
    word = text.strip().lower()
    if word in (ON, OFF):
        return Sparse() if word == ON else None
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in FIELDS:
            raise UnsupportedError(
                f"sparse: expected {ON}, {OFF} or fields such as {EXAMPLE}, got {part.strip()!r}"
            )
        if name in given:
            raise UnsupportedError(f"sparse.{name}: given twice; keep one")
        given[name] = value if name == "selector" else read_pages(value, f"sparse.{name}")
    try:
        return Sparse(**given)
    except UnsupportedError as error:
        raise UnsupportedError(f"sparse.{error}") from error


def write_sparse(sparse: Sparse, named: Iterable[str] = ("page", "budget", "recent")) -> str:
    """Format settings of sparse attention as text for `read_sparse`: the fields in `named`, and all
    others that differ from the defaults."""
    default, pieces = Sparse(), []
    for name in FIELDS:
        if name == "index_dim" and not sparse.indexed:
            continue
        value = getattr(sparse, name)
        if name in named or value != getattr(default, name):
            text = write_tokens(value).replace(",", "") if isinstance(value, int) else value
            pieces.append(f"{name}={text}")
    return ",".join(pieces)


def sparse_words(sparse: Sparse, *, hides: bool = True) -> str:
    """Say in one line which keys a query sees; `hides` is False if every query sees all keys."""
    what = "approximate" if hides else SEES_ALL
    return (
        f"sparse attention, {what}: of earlier tokens it sees {write_tokens(sparse.budget)} in "
        f"chosen pages of {write_tokens(sparse.page)}, {write_tokens(sparse.recent)} recent ones "
        f"and the first {write_tokens(sparse.sinks)}"
    )


def read_pages(value: str, name: str) -> int:
    """Parse the tokens of a field of sparse attention; 0 is allowed, unlike in `read_tokens`."""
    return 0 if re.fullmatch(r"0+", value) else read_tokens(value, name)
