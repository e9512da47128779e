"""What a GPU benchmark's record is worked out from, piece by piece."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.children import Row, read_rows
from benchmarks.gpu import ceilings, child, exact, huggingface
from benchmarks.gpu.device import Peaks, make_model
from benchmarks.gpu.floor import Ceilings, ceilings_of, floor, gap
from benchmarks.gpu.planned import Planner, cut_sizes
from benchmarks.gpu.split import COPIES, HOST, Busy, attributed, kind_of, read
from benchmarks.gpu.steps import reserve
from benchmarks.gpu.work import Place, Work, full, items, tiny
from farspan import Step
from farspan.host import TooLarge
from farspan.planner.machines import from_json, machine
from farspan.spec import Schedule, Tier

GIB = 2**30


@pytest.mark.parametrize(
    ("sizes", "layers", "cut"),
    [
        ((28,), 4, (4,)),
        ((14, 14), 28, (14, 14)),
        ((14, 14), 20, (6, 14)),
        ((14, 14), 7, (4, 3)),
        ((3, 5, 5, 5, 5, 5), 10, (5, 5)),
        ((1,) * 28, 4, (1, 1, 1, 1)),
        ((7, 7, 7, 7), 1, (1,)),
    ],
)
def test_schedules_are_cut_by_layers(
    sizes: tuple[int, ...], layers: int, cut: tuple[int, ...]
) -> None:
    assert cut_sizes(sizes, layers) == cut


def planner() -> Planner:
    return Planner(full(), replace(machine("h200"), host_bytes=118 * GIB))


@pytest.mark.parametrize("name", ["grouped", "memo", "fpdt", "oomb"])
def test_plans_of_few_layers_are_those_of_all(name: str) -> None:
    made = planner()
    (item,) = (i for i in items(full()) if i.name == f"{name} at 131072")
    whole = made.plan(item)
    cut = made.cut(whole, 4)
    assert len(cut.question.model.layers) == sum(cut.schedule.group_sizes(4)) == 4
    assert cut.schedule.chunk == whole.schedule.chunk
    # A share of the time is planned with it.
    assert cut.seconds.total / whole.seconds.total == pytest.approx(made.share(131072, 4), rel=0.2)


def test_time_is_attributed_once() -> None:
    busy = [
        Busy(0, 10, "linear"),
        Busy(4, 6, "loss"),  # on another stream, the latest to begin
        Busy(8, 14, COPIES[0]),  # exposed from 10 on
        Busy(12, 13, COPIES[1]),
        Busy(20, 22, "elementwise"),
    ]
    found = attributed(busy, (0.0, 25.0))
    expected = {"linear": 8, "loss": 2, COPIES[0]: 3, COPIES[1]: 1, "elementwise": 2, HOST: 9}
    assert {k: v for k, v in found.items() if v} == pytest.approx(
        {k: v * 1e-6 for k, v in expected.items()}
    )
    assert sum(found.values()) == pytest.approx(25e-6)
    assert sum(attributed(busy, (5.0, 11.0)).values()) == pytest.approx(6e-6)


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "kernel", "forward"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3",
            "kernel",
            "backward",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "kernel", "backward"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "kernel", "backward"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "kernel", "forward"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel", "kernel", "backward"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<>>", "kernel", "forward"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "kernel", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "kernel", "linear"),
        ("void cunn_SoftMaxForward<4, float, float>", "kernel", "loss"),
        ("nll_loss_forward_reduce_cuda_kernel_2d", "kernel", "loss"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "kernel", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", COPIES[0]),
        ("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", COPIES[1]),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "elementwise"),
    ],
)
def test_kernels_have_a_line(name: str, category: str, kind: str) -> None:
    expected = f"attention {kind}" if kind in ("forward", "backward") else kind
    assert kind_of(name, category) == expected


def test_a_profile_is_read() -> None:
    events: list[Row] = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "user_annotation", "name": "farspan step", "ts": 10.0, "dur": 20.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 12.0, "dur": 3.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 3.0},  # before it
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 11.0, "dur": 1.0},
    ]
    assert read(events, "gpu") == ((10.0, 30.0), [Busy(12.0, 15.0, "linear")])
    assert read(events, "cpu") == ((10.0, 30.0), [Busy(11.0, 12.0, "linear")])


CHUNK = 16384


def ceiling_rows() -> list[Row]:
    product = {"tokens": CHUNK, "head": False, "a_layer": 1, "flop": 2e12}
    seconds = {"forward": 2e12 / 790e12, "input": 2e12 / 790e12, "weight": 2e12 / 790e12}
    rows: list[Row] = [{"product": product | {"seconds": seconds}}]
    for causal, keys in ((True, CHUNK), (False, CHUNK)):
        for backend, slower in (("flash", 2.0), ("cudnn", 1.0)):
            rates = {"forward": 690e12 / slower, "backward": 575e12 / slower}
            found = {way: {"flop_a_second": rate} for way, rate in rates.items()}
            shape = {"queries": CHUNK, "keys": keys, "causal": causal, "backend": backend}
            rows.append({"attention": shape | found})
    return rows


@pytest.mark.parametrize(
    ("tokens", "nothing_again", "linear_again"),
    # The table of floors: GEMM 790, cuDNN 690 and 575 TFLOP/s.
    [(65536, 8.5, 9.6), (131072, 27.0, 29.2), (262144, 94.0, 98.4)],
)
def test_floors_are_those_worked_out_by_hand(
    tokens: int, nothing_again: float, linear_again: float
) -> None:
    schedule = Schedule(chunk=CHUNK, groups=1, attention_save_fraction=1.0, kv_kept=True)
    rates = ceilings_of(ceiling_rows(), schedule, tokens)
    assert rates is not None
    assert rates.linear == pytest.approx(790e12)
    assert rates.forward == pytest.approx(690e12)
    assert rates.backward == pytest.approx(575e12)
    question = planner().question(tokens, 28)
    assert floor(question, rates).total == pytest.approx(nothing_again, rel=0.01)
    found = floor(question, rates, schedule)
    both = found.total + sum(found.again.values())
    # All but the last layer's products are computed again.
    assert both == pytest.approx(linear_again, rel=0.02)


# Heads as wide as the model's, seven to a K, V head as there, and little of everything else.
NARROW = {
    **{"model_type": "qwen2", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256},
    **{"num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 1},
    "head_dim": 128,
}


@pytest.mark.gpu
def test_ceilings_are_measured_to_their_end(tmp_path: Path) -> None:
    """At a glance: every call that a step is planned from runs, and every floor is found."""
    settings = {"device": "cuda", "dtype": "bfloat16", "tiny": True, "config": NARROW}
    ceilings.run(settings | {"rows": str(tmp_path / "rows")})
    rows = read_rows(tmp_path / "rows")
    spec = from_json(rows[0]["machine_file"], "ceilings").spec
    assert spec.rates["bfloat16"].attention_backward.points
    assert spec.overhead > 0
    attended = [row["attention"] for row in rows if "attention" in row]
    assert [row.get("words") for row in attended] == [None] * 4
    assert {row["kernel"] for row in attended} == {"CudaCudnn", "CudaFlash"}
    assert ceilings_of(rows, Schedule(chunk=1024, kv_block=1024), 4096) is not None


def test_a_missing_ceiling_is_no_floor() -> None:
    rows = [row for row in ceiling_rows() if "product" in row]
    assert ceilings_of(rows, Schedule(chunk=CHUNK), 65536) is None


def test_gap_lines_add_up() -> None:
    found = floor(planner().question(65536, 4), Ceilings(790e12, 690e12, 575e12))
    lines = gap({"linear": 5.0, "host": 1.0}, found)
    assert [line["measured"] for line in lines] == [5.0, 1.0]
    assert lines[1] == {"part": "host", "measured": 1.0, "floor": 0.0, "again": 0.0, "slower": 1.0}
    assert lines[0]["floor"] + lines[0]["slower"] == pytest.approx(5.0)


def tiny_settings() -> Row:
    work: Work = tiny()
    return {"config": work.config, "dtype": "float64", "device": "cpu", "tiny": True}


def test_what_a_machine_cannot_lock_is_refused() -> None:
    settings = tiny_settings() | {"tokens": 50, "layers": 4, "host_memory": 1000}
    with pytest.raises(TooLarge, match="the baseline's step needs"):
        huggingface.lock(settings | {"place": Place.OFFLOAD})
    step = Step(make_model(settings), Schedule(chunk=16, boundary_inputs=Tier.HOST))
    with pytest.raises(TooLarge, match=r"a step of 50 tokens needs.*--host-memory"):
        reserve(settings, step)
    row = reserve(settings | {"host_memory": 10 * GIB}, step)
    assert row["arenas"] == {tier.value: size for tier, size in step.arena_bytes().items()}
    assert row["arenas"]["host"] > 1000


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (TooLarge("host memory: a step needs"), "out_of_main_memory"),
    ],
)
def test_what_ran_out_is_told_apart(
    error: Exception, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Row) -> None:
        raise error

    monkeypatch.setitem(child.WORKS, "step", fails)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(SystemExit, match="out of memory"):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})
    assert name in read_rows(tmp_path / "rows")[-1]
    monkeypatch.setitem(child.WORKS, "step", lambda _: [].pop())
    with pytest.raises(IndexError):
        child.run({"device": "cpu", "work": "step", "rows": str(tmp_path / "rows")})


def test_gradients_that_are_off_are_told() -> None:
    exactly = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    near = {"a": torch.tensor([3.0, 4.1]), "b": torch.tensor([12.1])}
    own = exact.errors(near, exactly)
    assert own["a"] == pytest.approx(0.02, rel=1e-5)
    assert own[""] == pytest.approx(0.02**0.5 / 13, rel=1e-5)
    assert exact.compared(own, own)["within"]
    far = exact.errors({"a": near["a"], "b": torch.tensor([12.5])}, exactly)
    assert not exact.compared(far, own)["within"]
    broken = exact.errors({"a": near["a"], "b": torch.tensor([float("nan")])}, exactly)
    assert not exact.compared(broken, own)["within"]


def test_peaks_of_a_gpu_are_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[int] = []
    found = {
        "reset_peak_memory_stats": lambda: reset.append(1),
        "max_memory_allocated": lambda: 70,
        "max_memory_reserved": lambda: 80,
        "memory_reserved": lambda: 75,
        "mem_get_info": lambda: (20, 100),
    }
    for name, answer in found.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with Peaks("cuda") as peaks:
        assert reset == [1]
    row = peaks.to_json()
    assert (row["allocated"], row["reserved"], row["outside"]) == (70, 80, 5)
    assert row["host"] > 2**20
