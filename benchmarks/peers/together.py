"""Ways on two ranks over gloo: torch's and accelerate's context parallelism, DeepSpeed's Ulysses
alone and under accelerate, farspan's layouts; and DeepSpeed's tiles on one rank.
"""

import math
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import farspan
from benchmarks.peers.alone import SCHEDULE, attention_of, batch_of
from benchmarks.peers.bed import IGNORED, Case, Flat, Found, of_model

RANKS = 2
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def grouped() -> None:
    """A process group, where there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def shifted(labels: Tensor) -> Tensor:
    """Each token's label is the next token."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


# -- torch ----------------------------------------------------------------------------------------


def context_parallel(case: Case) -> Found:
    """torch: the model inside context_parallel(mesh, buffers=...), causal masks left to SDPA, and
    gradients summed over ranks."""
    experimental = import_module("torch.distributed.tensor.experimental")
    grouped()
    model = case.built("sdpa")
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    flat = Flat.of(case)
    buffers = [flat.ids, flat.positions, shifted(flat.labels)]
    trained_tokens = int((buffers[2] != IGNORED).sum())
    causal = {"attention_mask": dict.fromkeys(kinds(model))}
    with experimental.context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
    ):
        ids, positions, labels = buffers
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **causal).logits
        loss = nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / trained_tokens
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := loss.detach())
    return of_model(model, total)


def kinds(model: Any) -> set[str]:
    return set(getattr(model.config, "layer_types", None) or ["full_attention"])


# -- accelerate ---------------------------------------------------------------------------


def whole(model: nn.Module, loss: float | Tensor) -> Found:
    """What is in `.grad` of a model whose parameters FSDP cut."""
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            gradients[name] = grad.double()
    return Found(torch.as_tensor(loss).item(), gradients)


def accelerate_cp(case: Case) -> Found:
    """accelerate: ParallelismConfig(cp_size=2) with FSDP2, and maybe_context_parallel around the
    step."""
    accelerate, utils = import_module("accelerate"), import_module("accelerate.utils")
    model: Any = case.built("sdpa")
    accelerator = accelerate.Accelerator(
        cpu=True,
        parallelism_config=accelerate.ParallelismConfig(cp_size=RANKS),
        fsdp_plugin=utils.FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    flat = Flat.of(case)
    batch = {"input_ids": flat.ids, "position_ids": flat.positions, "labels": flat.labels}
    batch["shift_labels"] = shifted(flat.labels)
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()),
        buffer_seq_dims=[1] * len(batch),
        no_restore_buffers=set(batch.values()),
    ):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
    return whole(model, accelerator.reduce(loss.detach(), "mean"))


# -- DeepSpeed ------------------------------------------------------------------------------------


def of_engine(engine: Any, loss: float | Tensor) -> Found:
    """Gradients that ZeRO has cut and reduced."""
    get = import_module("deepspeed.utils").safe_get_full_grad
    model = getattr(engine, "module", engine)
    named = {name: get(p) for name, p in model.named_parameters()}
    gradients = {name: grad.double() for name, grad in named.items() if grad is not None}
    return Found(torch.as_tensor(loss).item(), gradients)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The batch once for each rank, as every rank brings one."""

    def __init__(self, case: Case) -> None:
        flat = Flat.of(case)
        self.row = {
            "input_ids": flat.ids[0],
            "position_ids": flat.positions[0],
            "labels": flat.labels[0],
        }

    def __len__(self) -> int:
        return RANKS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row


def over_ranks(loss: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The mean over the tokens of all ranks, from each one's mean; differentiable."""
    functional = import_module("torch.distributed.nn.functional")
    counts = functional.all_gather((labels != IGNORED).sum(), group=group)
    losses = functional.all_gather(loss, group=group)
    total = sum(each * count for each, count in zip(losses, counts, strict=True) if count > 0)
    return torch.as_tensor(total / sum(counts))


def ulysses(case: Case) -> Found:
    """DeepSpeed: UlyssesSPAttentionHF.register_with_transformers(core_attn_implementation="sdpa"),
    UlyssesSPDataLoaderAdapter and ZeRO-3."""
    deepspeed = import_module("deepspeed")
    parts = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    groups = import_module("deepspeed.utils.groups")
    model: Any = case.built("sdpa")
    deepspeed.init_distributed("gloo")
    mpu = parts.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=RANKS,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    engine, *_ = deepspeed.initialize(
        config=ZERO | {"sequence_parallel_size": RANKS},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        mpu=mpu,
    )
    group = groups._get_sequence_parallel_group()
    loader = parts.UlyssesSPDataLoaderAdapter(
        torch.utils.data.DataLoader(Rows(case), batch_size=1),
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=group,
        sp_world_size=RANKS,
        device=engine.device,
    )
    batch = next(iter(loader))
    logits = engine(**batch, use_cache=False).logits
    labels = batch["shift_labels"]
    loss = engine.module.loss_function(
        logits=logits, labels=None, shift_labels=labels, vocab_size=logits.shape[-1]
    )
    loss = over_ranks(loss, labels, group)
    engine.backward(loss)
    return of_engine(engine, loss)


def parallelism() -> Any:
    accelerate, utils = import_module("accelerate"), import_module("accelerate.utils")
    return accelerate.ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=RANKS,
        sp_handler=utils.DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )


def accelerate_ulysses(case: Case) -> Found:
    """accelerate: ParallelismConfig(sp_backend="deepspeed", sp_size=2) with
    DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa") and ZeRO-3."""
    accelerate, utils = import_module("accelerate"), import_module("accelerate.utils")
    groups = import_module("deepspeed.utils.groups")
    model: Any = case.built("sdpa")
    accelerator = accelerate.Accelerator(
        parallelism_config=parallelism(),
        deepspeed_plugin=utils.DeepSpeedPlugin(hf_ds_config=dict(ZERO)),
    )
    loader = torch.utils.data.DataLoader(Rows(case), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, _, loader = accelerator.prepare(model, optimizer, loader)
    batch = next(iter(loader))
    labels = batch["shift_labels"]
    loss = model(**batch, labels=labels, use_cache=False).loss
    loss = over_ranks(loss, labels, groups._get_sequence_parallel_group())
    accelerator.backward(loss)
    return of_engine(model, loss)


def tiles(case: Case, fused: bool) -> Found:
    """TiledMLP in place of the MLPs, which are of gate_proj, up_proj and down_proj, and a tiled
    loss; the rest as transformers has it."""
    deepspeed = import_module("deepspeed")
    parts = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    model: Any = case.built(attention_of(case))
    kind: Any = type(model.model.layers[0].mlp)

    def plain(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return out

    def forward(module: Any, x: Tensor) -> Tensor:
        weights = [module.down_proj.weight, module.gate_proj.weight, module.up_proj.weight]
        shards = math.ceil(x.shape[1] / x.shape[2])
        out: Tensor = parts.TiledMLP.apply(plain, module, x, shards, weights)
        return out

    kind.forward = forward
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        config=ZERO | {"zero_optimization": {"stage": 2}},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    )
    loss = tiled_loss(parts, model, Flat.of(case), fused)
    engine.backward(loss)
    return of_engine(engine, loss)


def tiled_loss(parts: Any, model: Any, flat: Flat, fused: bool) -> Tensor:
    hidden = model.model(
        input_ids=flat.ids, position_ids=flat.positions, use_cache=False
    ).last_hidden_state
    labels = shifted(flat.labels)

    def summed(model: Any, hidden_states: Tensor, shift_labels: Tensor) -> Tensor:
        logits = model.lm_head(hidden_states).flatten(0, -2)
        return nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum")

    weights, shards = [model.lm_head.weight], 4
    if fused:
        total = parts.TiledFusedLogitsLoss.apply(
            summed, model, hidden, labels, None, shards, weights, "sum"
        )
    else:
        total = parts.sequence_tiled_compute(
            summed,
            labels.shape[1],
            shards,
            {"hidden_states": hidden, "shift_labels": labels},
            {"model": model},
            "hidden_states",
            weights,
            output_unshard_dimension=0,
            output_reduction="sum",
        )
    return torch.as_tensor(total / (labels != IGNORED).sum())


def tiled(case: Case) -> Found:
    """DeepSpeed on one rank with ZeRO-2: TiledMLP, and sequence_tiled_compute of the loss, summed
    and divided by the number of tokens."""
    return tiles(case, fused=False)


def tiled_fused(case: Case) -> Found:
    """The same with TiledFusedLogitsLoss(output_reduction="sum") in place of
    sequence_tiled_compute."""
    return tiles(case, fused=True)


# -- farspan --------------------------------------------------------------------------------------


def laid_out(case: Case, layout: farspan.Layout) -> Found:
    grouped()
    model: Any = case.built(attention_of(case))
    ranks = farspan.ParallelContext(layout, torch.device("cpu"))
    sharded = farspan.parallelize(model, SCHEDULE, ranks)
    loss = farspan.Step(model, SCHEDULE, ranks=sharded)(*batch_of(case))
    return whole(model, loss)


def far_ulysses(case: Case) -> Found:
    """farspan: parallelize(...) with Layout(ulysses=2), and Step."""
    return laid_out(case, farspan.Layout(ulysses=RANKS))


def far_shards(case: Case) -> Found:
    """farspan: parallelize(...) with Layout(shards=2), and Step."""
    return laid_out(case, farspan.Layout(shards=RANKS))


def far_ring(case: Case) -> Found:
    """farspan: parallelize(...) with Layout(ring=2), and Step."""
    return laid_out(case, farspan.Layout(ring=RANKS))
