"""The share of one device: what its own program is built from."""

from dataclasses import replace

from farspan.plan.balance import chunks_of
from farspan.plan.grid import group_ranges
from farspan.plan.layout import Layout, Range
from farspan.plan.question import Question
from farspan.plan.share import cells_of, exchanging
from farspan.plan.states import refuse_shared_states
from farspan.spec import ModelSpec, Refused, RunSpec, Schedule


def local_run(question: Question, schedule: Schedule) -> RunSpec:
    """The run in the tokens of one device, which has a part of every chunk."""
    return replace(question.run, tokens=local_chunks(question, schedule)[-1][1])


def local_schedule(schedule: Schedule, layout: Layout) -> Schedule:
    """The schedule in the tokens of one device. A block of K, V holds `kv_block` keys of 1 / P of
    the heads, as many bytes as 1 / P of the keys of all heads."""
    ranks = layout.sequence()
    return replace(
        schedule,
        chunk=max(1, -(-schedule.chunk // ranks)),
        kv_block=max(1, -(-schedule.kv_block // ranks)),
    )


def stage_schedule(question: Question, schedule: Schedule) -> Schedule:
    """The schedule of the fullest pipeline stage: stages are groups, so a stage is one group of all
    its layers. `question` has the whole model."""
    if question.layout.pipeline == 1:
        return schedule
    return replace(schedule, groups=(len(local_model(question).layers),))


def whole_schedule(question: Question, schedule: Schedule) -> Schedule:
    """The reverse of `stage_schedule`: a group for each stage, as ranks run it."""
    if question.layout.pipeline == 1:
        return schedule
    ranges = group_ranges(Schedule(), len(question.model.layers), question.layout.pipeline)
    return replace(schedule, groups=tuple(stop - start for start, stop in ranges))


def local_chunks(question: Question, schedule: Schedule) -> tuple[Range, ...]:
    """The chunks of one device, in its own tokens: of each an equal part, rounded up. `question`
    has the whole model; `schedule` is in tokens of the sequence."""
    layout = question.layout
    return cells_of(chunks_of(question.model, question.run.tokens, schedule, layout), layout)


def local_model(question: Question) -> ModelSpec:
    """The layers of the fullest pipeline stage, the last: it has the head."""
    model, stages = exchanging(question.model, question.layout), question.layout.pipeline
    if stages == 1:
        return model
    if stages > len(model.layers):
        raise Refused(
            f"pipeline: {stages} stages for {len(model.layers)} layers; use at most one a layer"
        )
    layers = model.layers[-(-len(model.layers) // stages) * -1 :]
    left_out = sum(layer.work.parameters for layer in model.layers[: -len(layers)])
    frozen = sum(layer.work.trainable for layer in model.layers[: -len(layers)])
    return replace(
        model,
        layers=layers,
        parameters=model.parameters - left_out,
        trainable=model.trainable - frozen,
    )


def refuse_layout(question: Question) -> None:
    """Raises Refused when the model's heads cannot be shared as the layout says."""
    layout = question.layout
    refuse_shared_states(question.model, layout)
    for layer in question.model.layers:
        heads = layout.ulysses * layout.tensor
        if layer.kv_heads % heads:
            raise Refused(
                f"ulysses: {layer.kv_heads} K, V heads cannot be shared by {heads} devices; use a "
                f"divisor of {layer.kv_heads}, and shards for the rest"
            )
