"""`farspan calibrate` and `farspan profile`: measure this machine, and a model."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from farspan.cli import typer_app
from farspan.durable import check_place
from farspan.engine.calibrate import calibrate
from farspan.engine.profile import measure
from farspan.planner.machines import busy_words, to_json, user_file, write
from farspan.profile import store
from farspan.profile.catalog import find_config, presets
from farspan.profile.model import ModelProfile, Variant
from farspan.report.tables import machine_view, show
from farspan.spec import UnsupportedError
from farspan.train.staged_states import drive_rate

app, profile_app = typer_app(), typer_app()


@app.command("calibrate")
def calibrate_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: cuda if available.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take seconds rather than a minute; less precise.")
    ] = False,
    disk: Annotated[
        Path | None,
        typer.Option(help="Also measure the drive of this folder, with a file of 1.6 GB."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"File to write; default: {user_file()}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's content.")] = False,
) -> None:
    """Measure this machine and write the file that `farspan plan` reads."""
    chosen, path = device_of(device), output or user_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_place(path, "output")
    with Console(stderr=True).status("measuring") as status:
        rate = None
        if disk is not None:  # first, as it may be refused
            status.update("the drive")
            rate = drive_rate(disk)
        measured = calibrate(chosen, progress=status.update, quick=quick)
    if rate is not None:
        known = {name: words for name, words in measured.sources.items() if name != "disk"}
        measured = replace(measured, spec=replace(measured.spec, disk=rate), sources=known)
    write(measured, path)
    if (words := busy_words(measured.spread)) is not None:
        print(f"warning: {words}", file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(measured)))
    else:
        show(machine_view(measured))
        print(f"written to {path}")


def device_of(name: str | None) -> torch.device:
    """Return the device named on the command line. Raises UnsupportedError if it does not exist."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if has_gpu else "cpu")
    if name not in ("cpu", "cuda"):
        raise UnsupportedError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not has_gpu:
        raise UnsupportedError("device: no CUDA device can be used here; give cpu")
    return torch.device(name)


# -- a model --------------------------------------------------------------------------------------


@profile_app.command("profile")
def profile_command(
    model: Annotated[str, typer.Argument(help="A preset, folder, config.json or name on the hub.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    lora: Annotated[int, typer.Option(help="Rank of adapters; 0 trains all weights.")] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels/--no-kernels", help="Use farspan's own kernels, as on a GPU.")
    ] = True,
    write: Annotated[
        bool, typer.Option("--write", help="Rewrite a preset's profile in the package.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile.")] = False,
) -> None:
    """Measure the costs of a model, which `farspan plan` reads; no weights, on any machine."""
    config = find_config(model)
    if write:
        if model not in {preset.name for preset in presets()}:
            raise UnsupportedError(
                f"model: --write needs the name of a preset, got {model!r}; leave --write out"
            )
        print(f"written to {store.write(model, store.make(config, measure))}")
        return
    ours = kernels and dtype != "float64"
    found = measure(config, Variant(dtype, lora, ours, ours), model)
    print(json.dumps(store.to_json([found])[0]) if as_json else _profile_text(found))


def _profile_text(profile: ModelProfile) -> str:
    rows = [f"{profile.spec.name}: {profile.spec.parameters:,} parameters, {profile.variant.key()}"]
    for number in range(len(profile.kinds)):
        layers = profile.kind_of.count(number)
        layer = profile.spec.layers[profile.kind_of.index(number)]
        graph = profile.kinds[number].cells["graph"].graph[1]
        flop = sum(2 * inner * outer for inner, outer in layer.work.products)
        rows.append(
            f"{layers} layers: {layer.work.parameters:,} parameters; per token: {flop:,} FLOP in "
            f"matmuls, {graph:,.0f} bytes in a graph without O and LSE, bytes moved: "
            f"{layer.work.forward_traffic:,} forward, {layer.work.backward_traffic:,} back"
        )
    return "\n".join(rows)
