"""What PYTORCH_CUDA_ALLOC_CONF may say, as far as it decides where blocks lie."""

from dataclasses import dataclass, fields

from farspan.spec import Refused

MIB = 2**20
UNLIMITED = 2**60  # bytes, more than any device has
MIN_BLOCK = 512
LARGE_SEGMENT = 20 * MIB
LEAST_LARGE_SEGMENT = 10 * MIB  # such a segment serves requests up to here
LEAST_LIMIT = 20 * MIB

# Name in PYTORCH_CUDA_ALLOC_CONF: field, and bytes of its unit.
NAMES = {
    "max_split_size_mb": ("max_split", MIB),
    "max_non_split_rounding_mb": ("max_rounding", MIB),
    "large_segment_size_mb": ("large_segment", MIB),
    "roundup_power2_divisions": ("divisions", 1),
    "garbage_collection_threshold": ("collect_at", 1),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Bytes unless a name says otherwise; the defaults are PyTorch's."""

    max_split: int = UNLIMITED  # blocks from here are neither split nor given to smaller requests
    max_rounding: int = LARGE_SEGMENT  # what a request from there may leave unused of its block
    large_segment: int = LARGE_SEGMENT
    divisions: int = 0  # sizes between two powers of two; 0 to round up to 512 bytes instead
    collect_at: float = 0.0  # share of the capacity from which old segments are given back; 0 never
    event_delay: int = 16  # mallocs until the work of a recorded stream is taken to be over

    def __post_init__(self) -> None:
        given = {
            "max_split_size_mb": self.max_split,
            "max_non_split_rounding_mb": self.max_rounding,
        }
        for name, size in given.items():
            if size < LEAST_LIMIT:
                raise Refused(f"{name}: expected at least 20, got {size // MIB}")
        if self.large_segment <= LEAST_LARGE_SEGMENT:
            raise Refused(
                f"large_segment_size_mb: expected more than 10, got {self.large_segment // MIB}"
            )
        if self.divisions < 0 or self.divisions & (self.divisions - 1):
            raise Refused(
                f"roundup_power2_divisions: expected a power of two, got {self.divisions}"
            )
        if not 0 <= self.collect_at < 1:
            raise Refused(
                f"garbage_collection_threshold: expected 0 up to 1, got {self.collect_at}"
            )

    def rounded(self, size: int) -> int:
        """Bytes of the block for a request of `size` > 0 bytes."""
        if self.divisions > 1 and size > MIN_BLOCK * self.divisions:
            power = 1 << (size.bit_length() - 1)
            part = power // self.divisions
            return -(-size // part) * part
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def read_settings(text: str) -> Settings:
    """From `max_split_size_mb:512,garbage_collection_threshold:0.8`. Raises Refused naming the
    part that is not understood."""
    given: dict[str, int | float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition(":")
        if name not in NAMES:
            raise Refused(f"alloc-conf: expected {', '.join(NAMES)}, got {name!r}")
        field, unit = NAMES[name]
        try:
            given[field] = float(value) if field == "collect_at" else int(value) * unit
        except ValueError:
            raise Refused(f"alloc-conf: {name}: expected a number, got {value!r}") from None
    assert given.keys() <= {field.name for field in fields(Settings)}
    return Settings(**given)  # type: ignore[arg-type]
