"""`farspan profile`: measure what a model costs."""

import json
from typing import Annotated

import typer

from farspan.cli import typer_app
from farspan.engine.profile import measure
from farspan.profile import store
from farspan.profile.catalog import find_config, presets
from farspan.profile.model import ModelProfile, Variant
from farspan.spec import UnsupportedError

app = typer_app()


@app.command("profile")
def profile_command(
    model: Annotated[str, typer.Argument(help="A preset, folder, config.json or name on the hub.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    lora: Annotated[int, typer.Option(help="Rank of adapters; 0 trains all weights.")] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels/--no-kernels", help="farspan's own kernels, as on a GPU.")
    ] = True,
    write: Annotated[
        bool, typer.Option("--write", help="Make a preset's file in the package anew.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile.")] = False,
) -> None:
    """Measure what a model costs, which `farspan plan` reads; no weights, on any machine."""
    config = find_config(model)
    if write:
        if model not in {preset.name for preset in presets()}:
            raise UnsupportedError(
                f"model: {model!r} is no preset's name, whose file could be written"
            )
        print(f"written to {store.write(model, store.make(config, measure))}")
        return
    ours = kernels and dtype != "float64"
    found = measure(config, Variant(dtype, lora, ours, ours), model)
    print(json.dumps(store.to_json([found])[0]) if as_json else _text(found))


def _text(profile: ModelProfile) -> str:
    """A row for each kind of layer."""
    rows = [f"{profile.spec.name}: {profile.spec.parameters:,} parameters, {profile.variant.key()}"]
    for number in range(len(profile.kinds)):
        layers = profile.kind_of.count(number)
        layer = profile.spec.layers[profile.kind_of.index(number)]
        graph = profile.kinds[number].cells["graph"].graph[1]
        flop = sum(2 * inner * outer for inner, outer in layer.work.products)
        rows.append(
            f"{layers} layers: {layer.work.parameters:,} parameters; a token: {flop:,} FLOP in "
            f"products, {graph:,.0f} bytes in a graph beside O and LSE, "
            f"{layer.work.forward_traffic:,} moved forward, {layer.work.backward_traffic:,} back"
        )
    return "\n".join(rows)
