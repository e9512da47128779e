"""Machine presets and files: valid, read back as written, refused by the field's name."""

import copy
import json
import math
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from farspan.planner.machines import (
    CURVES,
    MAY_BE_ZERO,
    PRESETS,
    busy_words,
    count_of,
    from_json,
    machine,
    names,
    preset_of_gpu,
    read,
    to_json,
    user_file,
    write,
)
from farspan.spec import AttentionKernel, MachineSpec, UnsupportedError
from tests.grids import crossed

KINDS = ("datasheet: ", "measured: ", "assumed: ")
NEEDED = [f.name for f in fields(MachineSpec) if f.default is MISSING]
NUMBERS = [f.name for f in fields(MachineSpec) if f.type in (int, float)]


def values(name: str = "h200") -> dict[str, Any]:
    """A machine file as JSON gives it."""
    return copy.deepcopy(json.loads(json.dumps(to_json(read(name)))))


def refusal(given: object) -> str:
    with pytest.raises(UnsupportedError) as caught:
        from_json(given, "machine file m.json")
    assert str(caught.value).startswith("machine file m.json")
    return str(caught.value)


@pytest.mark.parametrize("name", names())
def test_presets_could_exist(name: str) -> None:
    spec = machine(name)
    assert spec.name == name
    assert spec.unified == (name == "gb10")
    assert not spec.on_cpu
    assert (
        spec.reserve < spec.device_bytes < (spec.host_bytes + spec.host_reserve) * spec.devices + 1
    )
    assert spec.fetch_together <= spec.fetch <= spec.memory
    assert spec.evict_together <= spec.evict <= spec.memory
    # What one device moves both ways, the main memory moves.
    assert spec.fetch_together + spec.evict_together <= spec.host_memory
    for rates in spec.rates.values():
        for curve in CURVES:
            assert max(rate for _, rate in getattr(rates, curve).points) < rates.peak
    forward, backward = (getattr(spec.rates["bfloat16"], curve) for curve in CURVES[1:])
    assert backward.at(1e13) < forward.at(1e13)


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_preset_says_how_it_is_known(name: str) -> None:
    file = read(name)
    expected = {f.name for f in fields(MachineSpec)} - {"name", "rates", "unified", "pinned"}
    for dtype in file.spec.rates:
        expected |= {f"rates.{dtype}.{field}" for field in values(name)["rates"][dtype]}
    assert file.sources.keys() == expected
    assert file.about
    for source in file.sources.values():
        assert source.startswith(KINDS)
        assert "recalled" not in source
    # A number that a preset has of its own may not keep the source of the one that it is like.
    own = json.loads(PRESETS.read_text(encoding="utf-8"))[name]
    numbers = {key for key, value in own.items() if type(value) in (int, float)}
    peaks = {f"rates.{dtype}.peak" for dtype in own["rates"]}
    assert numbers | peaks <= own["sources"].keys()


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("a100", r"did you mean a100-40g or a100-80g\?"),
        ("4o90", "rtx4090"),
        ("rtx 4090 laptop", r"did you mean rtx4090\?"),
        ("GB200", "two B200 with a Grace CPU; give --gpu b200"),
        ("t4", "no bfloat16; give one of Ampere or later"),
        ("rtx 3060", "give --gpu rtx3080 --device-memory SIZE"),
        ("4090 D", "fewer cores than the 4090; give --gpu rtx4090"),
        ("cpu", "for this machine, .* give --gpu here"),
        ("banana", r"some are h100, h200, b200 and \d+ more \(farspan plan --help\)"),
        ("24 GB", "did you mean rtx4090 or rtx3090"),
        ("4090 48gb", "give --machine rtx4090 --device-memory 48GB"),
        ("8", "for a number of devices give --gpus 8"),
    ],
)
def test_an_unknown_name_is_refused_with_close_ones(name: str, close: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s)machine: '{name}'.*{close}") as refused:
        machine(name)
    assert len(f"farspan: {refused.value}") <= 3 * 80


@pytest.mark.parametrize(
    ("name", "card", "count"),
    [
        ("8 H100s", "h100", 8),
        ("4 4090s", "rtx4090", 4),
        ("2 L40S", "l40s", 2),
        ("dgx h100", "h100", 8),
        ("HGX-H200", "h200", 8),
        ("DGX Spark", "gb10", None),
        ("MI300", "mi300x", None),
    ],
)
def test_several_cards_as_people_write_them(name: str, card: str, count: int | None) -> None:
    assert (machine(name).name, count_of(name)) == (card, count)


@pytest.mark.parametrize(
    ("preset", "called"),
    [
        ("rtx4090", "4090|RTX 4090|NVIDIA GeForce RTX 4090|rtx-4090|RTX_4090|4090 24gb"),
        ("h100", "h100-80gb|H100 SXM|h100 sxm5|NVIDIA H100 80GB HBM3|H100_80GB"),
        ("h100-pcie", "h100 pcie|NVIDIA H100 PCIe|H100-PCIE-80GB"),
        ("h100-nvl", "H100 NVL|nvidia h100 nvl|h100 94gb nvl"),
        ("a100-80g", "a100 80gb|A100-SXM4-80GB|a100-80|a100 80|tesla a100 80g"),
        ("a100-40g", "a100 40gb|A100 40G"),
        ("rtx4070ti-super", "4070 ti super|4070tisuper|RTX 4070 Ti SUPER 16GB"),
        ("rtx3080", "3080|rtx 3080 10gb"),
        ("rtx3080-12g", "3080 12GB"),
        ("rtxpro6000", "RTX PRO 6000|RTX 6000 Pro|rtx6000pro|rtx pro 6000 blackwell"),
        ("rtx6000-ada", "rtx 6000 ada|NVIDIA RTX 6000 Ada Generation"),
        ("a6000", "rtx a6000|A6000 48GB"),
        ("h200", "H200 141GB|NVIDIA H200|h200 sxm"),
        ("b200", "b200 192gb|NVIDIA B200"),
        ("gh200", "GH200|NVIDIA GH200 480GB|Grace Hopper"),
        ("gb10", "GB10|DGX Spark"),
        ("mi300x", "AMD Instinct MI300X|mi300x 192gb"),
    ],
)
def test_cards_by_their_usual_names(preset: str, called: str) -> None:
    assert {machine(name).name for name in called.split("|")} == {preset}


@pytest.mark.parametrize("name", names())
def test_a_card_is_found_by_what_its_driver_calls_it(name: str) -> None:
    values = json.loads(PRESETS.read_text(encoding="utf-8"))[name]
    for called in (name, *values["gpu_names"], *values.get("aliases", ())):
        assert machine(called).name == name


def test_several_cards_in_a_name() -> None:
    for name in ("8xh100", "8 x H100", "8*h100", "h100x8", "H100:8", "h100 x 8"):
        assert (machine(name), count_of(name)) == (machine("h100"), 8)
    assert (machine("4x4090").devices, count_of("4x4090")) == (4, 4)
    assert (machine("16xh100").devices, count_of("16xh100")) == (8, 16)
    assert [count_of(name) for name in ("h100", "rtx4090", "mi300x", "here")] == [None] * 4


def test_gpus_find_their_preset() -> None:
    assert preset_of_gpu("NVIDIA A100-SXM4-80GB") == "a100-80g"
    assert preset_of_gpu("NVIDIA GeForce RTX 4090") == "rtx4090"
    # Another chip on the same die, with other memory and another link.
    assert preset_of_gpu("NVIDIA GH200 480GB") == "gh200"
    assert preset_of_gpu("NVIDIA L40") is None


@pytest.mark.parametrize("name", names())
def test_a_file_reads_back_as_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "m.json"
    write(read(name), path)
    assert read(path) == read(name)
    assert machine(str(path)) == machine(name)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    given = values()
    del given[name]
    assert f"m.json: {name} is missing" in refusal(given)


@pytest.mark.parametrize(
    ("name", "bad"), crossed(NUMBERS, [-1, True, "8", None, math.nan, math.inf, 10**400])
)
def test_a_number_that_is_none_is_refused_by_name(name: str, bad: object) -> None:
    assert f"{name}: expected" in refusal(values() | {name: bad})


@pytest.mark.parametrize("name", NUMBERS)
def test_zero_is_a_number_only_where_nothing_may_be(name: str) -> None:
    given = values() | {name: 0}
    if name in MAY_BE_ZERO:
        assert getattr(from_json(given, "m").spec, name) == 0
    else:
        assert f"{name}: expected more than zero" in refusal(given)


def test_an_unknown_field_is_refused_with_a_close_one() -> None:
    assert "evictt: no such field; did you mean evict?" in refusal(values() | {"evictt": 1})
    given = values()
    given["rates"]["bfloat61"] = given["rates"].pop("bfloat16")
    assert "bfloat61: no such field; did you mean bfloat16?" in refusal(given)
    given = values()
    given["rates"]["float32"]["matmull"] = 1
    assert "rates.float32: matmull: no such field" in refusal(given)


@pytest.mark.parametrize(
    "curve",
    [
        [],
        [[1e9, 1e12], [1e9, 2e12]],
        [[1e9]],
        [[1e9, -1.0]],
        [["1", 2]],
        [[math.inf, 1e12]],
    ],
)
def test_a_curve_that_is_none_is_refused_by_name(curve: object) -> None:
    given = values()
    given["rates"]["bfloat16"]["matmul"] = curve
    assert "rates.bfloat16.matmul" in refusal(given)


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # Fields of bfloat16's rates, fields of the machine, what is said.
    (
        {"weights": [[1e9, 1e12], [8e9, 9.9e14]]},
        {},
        "rates.bfloat16.weights: expected no rate above rates.bfloat16.peak, 9.89e+14 FLOP a "
        "second, got 9.9e+14 at a call of 8e+09 FLOP",
    ),
    ({"causal_backward": [[1e9, 1e15]]}, {}, "rates.bfloat16.causal_backward: expected no rate"),
    (
        {"matmul": [[1e9, 5e14], [1e10, 4.9e13], [1e11, 6e14]]},
        {},
        "rates.bfloat16.matmul: expected a larger call to be about as fast or faster, got 4.9e+13 "
        "FLOP a second at 1e+10 FLOP, but 5e+14 FLOP a second at 1e+09 FLOP",
    ),
    (
        {"softmax_forward": 9e-13},
        {},
        "rates.bfloat16.softmax_forward: expected less than the time of the whole call by "
        "attention_forward, 8.46e-13 seconds per query, key and head, got 9e-13",
    ),
    (
        {},
        {"fetch": 1e10},
        "fetch_together: expected no more than fetch, 1e+10 bytes a second, since the other "
        "direction is busy too, got 5.01e+10",
    ),
    ({}, {"evict_together": 1.1e11}, "evict_together: expected no more than evict, 5.33e+10"),
]


@pytest.mark.parametrize(("rates", "fields", "message"), CONTRADICTIONS)
def test_rates_that_contradict_each_other_are_refused(
    rates: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    given = values() | fields
    given["rates"]["bfloat16"] |= rates
    assert f"m.json: {message}" in refusal(given)
    assert "correct it, or run farspan calibrate when the machine is idle" in refusal(given)


def test_rates_may_fall_as_far_as_caches_make_them() -> None:
    given = values() | {"fetch_together": 1e11}
    given["rates"]["bfloat16"]["matmul"] = [[1e9, 5e14], [1e10, 5e13], [1e11, 9.89e14]]
    read_back = to_json(from_json(given, "m"))
    assert read_back["fetch_together"] == 1e11
    assert read_back["rates"]["bfloat16"]["matmul"] == given["rates"]["bfloat16"]["matmul"]


def test_a_busy_machine_is_named_by_what_varied_most() -> None:
    assert busy_words({"memory": 1.4, "rates.float32.matmul": 3.14}) == (
        "the machine was busy: rates.float32.matmul varied by 3.1x; run again when it is idle"
    )
    words = busy_words({"a": 2.0, "b": 9.0, "c": 3.0, "d": 4.0, "e": 5.0})
    assert words is not None
    assert "busy: b varied by 9.0x, e varied by 5.0x, d varied by 4.0x and 2 more;" in words


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "expected the fields of a machine, got int 5"),
        (values() | {"rates": {}}, "rates: expected at least one of bfloat16"),
        (values() | {"unified": "no"}, "unified: expected true or false, got str 'no'"),
        (values() | {"sources": "nowhere"}, "sources: expected keys and values"),
    ],
)
def test_what_is_no_machine_is_refused(given: object, message: str) -> None:
    assert f"m.json: {message}" in refusal(given)


def test_a_file_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"gone\.json: missing"):
        machine(tmp_path / "gone.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(UnsupportedError, match=r"broken\.json: cannot be read as JSON"):
        machine(broken)


def test_the_users_file_lies_in_the_configuration_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/me")
    assert user_file() == Path("/etc/me/farspan/machine.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_file() == Path("/home/me/.config/farspan/machine.json")


def test_the_fastest_kernel_comes_back_and_older_files_have_none() -> None:
    file = read("h200")
    assert file.spec.rates["bfloat16"].kernel is None
    rates = replace(
        file.spec.rates["bfloat16"],
        kernel=AttentionKernel.FA4,
        backward_kernel=AttentionKernel.CUDNN,
        deterministic=1.3,
    )
    mine = replace(file, spec=replace(file.spec, rates={"bfloat16": rates}))
    assert from_json(json.loads(json.dumps(to_json(mine))), "m") == mine
    old = to_json(mine)
    for name in ("kernel", "backward_kernel"):
        del old["rates"]["bfloat16"][name]
    for values_of, name in ((old, "processors"),):
        del values_of[name]
    read_again = from_json(old, "m").spec
    assert (read_again.rates["bfloat16"].kernel, read_again.processors) == (None, 0)
    for wrong in ("auto", "fast", 5, None):
        old["rates"]["bfloat16"]["kernel"] = wrong
        with pytest.raises(
            UnsupportedError, match=r"bfloat16\.kernel: expected one of cudnn, flash, fa3"
        ):
            from_json(old, "m")
    old["rates"]["bfloat16"] |= {"kernel": "fa3", "backward_kernel": "flash"}
    with pytest.raises(UnsupportedError, match=r"backward_kernel: expected another than flash"):
        from_json(old, "m")
