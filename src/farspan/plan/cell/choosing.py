"""Bytes that choosing pages takes, and measuring what the choice sees; see `plan.cell.sparse`."""

from farspan.plan.cell.sparse import INDEX, Far, far_bytes, far_of, most_units_of
from farspan.spec import ModelSpec, Schedule

# Elements of scores that votes hold at one time on a CPU, or one page of queries' if that is more.
# On a GPU they are more (sparse.select), which no plan counts.
SCORES = 2**18
SAMPLES = 16  # queries of a cell whose seen mass is measured
WATCHED_KEYS = 1024  # that they are compared with at one time
MASKS = 3  # bytes of masks, a sample and key


def choice_bytes(far: Far) -> int:
    """Bytes that choosing a chunk's pages holds at most: while queries vote, the means in the
    accumulate dtype and parts of the scores; then votes, sorted, and masks of them."""
    wide, candidates = far.row.wide, far.candidates
    of_page = far.batch * far.heads * far.page * candidates
    at_once = min(far.query_pages, max(1, SCORES // of_page))
    means = far.batch * far.kv_heads * far.head_dim * candidates
    queries = far.batch * far.heads * far.page * at_once * far.head_dim
    votes = far.batch * far.kv_heads * far.query_pages * candidates
    voting = means + queries + 3 * at_once * of_page + 8 * votes
    return max(wide * voting, votes * (2 * wide + 3 * INDEX))


def watch_bytes(far: Far, q_start: int) -> int:
    """Bytes that measuring the seen mass holds at most: scores of a few queries, and keys, in the
    accumulate dtype."""
    keys = far.batch * min(q_start, WATCHED_KEYS)
    scores = far.heads * SAMPLES
    queries = far.batch * scores * far.head_dim
    compared = keys * (2 * scores + far.kv_heads * far.head_dim) + 2 * queries
    return far.row.wide * compared + MASKS * SAMPLES * keys


def grown_bytes(model: ModelSpec, schedule: Schedule, batch: int, lengths: tuple[int, int]) -> int:
    """Bytes by which a last chunk's far part, in its backward, or its choice may take more at the
    second of two lengths than at the first."""
    found = [0]
    for layer in set(model.layers):
        sizes: list[tuple[int, int]] = []
        for tokens in lengths:
            start = (tokens - 1) // schedule.chunk * schedule.chunk
            # A last chunk that is ragged takes less than those before it.
            full, run = min(schedule.chunk, tokens), (batch, model.element_bytes)
            far = None
            if schedule.sparse is not None:
                far = far_of(layer, schedule.sparse, run, start, full)
            if far is None:
                sizes.append((0, 0))
                continue
            attended = far_bytes(far, most_units_of(far), backward=True)
            sizes.append((attended, choice_bytes(far)))
        found += [long - short for short, long in zip(*sizes, strict=True)]
    return max(found)
