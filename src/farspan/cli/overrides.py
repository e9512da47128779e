"""What the command line puts in place of a run file's own, and what it says of that."""

from dataclasses import fields, replace

from farspan.spec import Sparse
from farspan.train.config import RunConfig, ScheduleConfig, SparseConfig
from farspan.train.yaml_config import to_mapping


def with_strategy(run: RunConfig, name: str) -> tuple[RunConfig, str | None]:
    """The run with another strategy, whole: fields meant for the one before go with it, but not
    where weights live. Also a sentence that says which, where there were any."""
    weights = run.schedule.weights
    dropped = replace(run.schedule, weights=None).given()
    note = None
    if dropped:
        fields_text = ", ".join(f"{key}: {value}" for key, value in to_mapping(dropped).items())
        note = (
            f"schedule: {name} in place of {run.schedule.strategy or 'the one written out'}, "
            f"without {fields_text}, which belonged to it"
        )
    return replace(run, schedule=ScheduleConfig(strategy=name, weights=weights)), note


def with_sparse(run: RunConfig, sparse: Sparse | None) -> tuple[RunConfig, str | None]:
    """The run with this attention in place of its own, of which the threshold of its warning stays.
    Also a sentence that says what went, if anything did."""
    before, note = run.sparse, None
    if sparse is None:
        if before is not None:
            note = "sparse: dense attention in place of the run file's sparse one"
        return replace(run, sparse=None), note
    before = before or SparseConfig()
    if before.sparsity is not None:
        note = f"sparse: without sparsity: {before.sparsity}, which belonged to the run file's"
    pages = {f.name: getattr(sparse, f.name) for f in fields(Sparse)}
    return replace(run, sparse=SparseConfig(**pages, warn_below=before.warn_below)), note
