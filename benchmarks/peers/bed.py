"""Models by seed, batches, and the loss and gradients that every way is held to."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

IGNORED = -100  # a label that is not trained on
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
# A name, its model_type, and what its configuration has beside the common fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {}),
    "windows": ("gemma3_text", ALTERNATING | {"query_pre_attn_scalar": 8}),
    "windows and sinks": (
        "gpt_oss",
        ALTERNATING
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
DOCUMENTS = (37, 5, 64, 101, 25)
WHOLE = sum(DOCUMENTS)
# Lengths of the documents in one sequence. Two ranks cannot halve an odd one.
BATCHES: dict[str, tuple[int, ...]] = {
    "one document": (WHOLE,),
    "odd length": (WHOLE - 1,),
    "five documents": DOCUMENTS,
    "five, odd length": (*DOCUMENTS[:-1], DOCUMENTS[-1] - 1),
}
DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch and a dtype by their names; `share` of every document is taken."""

    model: str
    batch: str
    dtype: str
    share: float = 1.0

    def lengths(self) -> list[int]:
        return [max(2, round(self.share * length)) for length in BATCHES[self.batch]]

    def documents(self) -> list[Tensor]:
        """Ids of each document: shape [tokens], int64."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, COMMON["vocab_size"], (sum(self.lengths()),), generator=generator)
        return list(ids.split(self.lengths()))

    def built(self, attention: str, dtype: str | None = None) -> PreTrainedModel:
        """The model in training, the same parameters whatever the attention implementation."""
        kind, fields = MODELS[self.model]
        config = AutoConfig.for_model(kind, **COMMON | fields)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation="eager"
        )
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in model.parameters():
                # Large enough for attention to matter: what is left out shows.
                centre, spread = (1.0, 0.1) if p.ndim == 1 and p.mean() == 1.0 else (0.0, 0.3)
                p.copy_(centre + spread * torch.randn(p.shape, generator=generator))
        return model.to(getattr(torch, dtype or self.dtype)).train()


@dataclass(frozen=True, slots=True)
class Found:
    """The mean loss over trained tokens, and the gradient of every parameter by its name."""

    loss: float
    gradients: dict[str, Tensor]


def of_model(model: torch.nn.Module, loss: float | Tensor) -> Found:
    """What is in `.grad`."""
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return Found(torch.as_tensor(loss).item(), gradients)


@lru_cache(maxsize=1)
def expected(case: Case) -> Found:
    """Plain autograd in float64, eager attention, one document after the other."""
    model = case.built("eager", "float64")
    documents = case.documents()
    trained = sum(len(ids) - 1 for ids in documents)
    total = 0.0
    for ids in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, ids[1:], reduction="sum") / trained
        loss.backward()
        total += loss.item()
    return of_model(model, total)


def errors(found: Found, right: Found) -> dict[str, Any]:
    """Relative errors: of the loss, and of the gradient that is furthest off, in the L2 norm. A
    parameter without a gradient is off by 1."""
    off = {}
    for name, gradient in right.gradients.items():
        own = found.gradients.get(name)
        norm = gradient.norm()
        off[name] = 1.0 if own is None else float((own - gradient).norm() / norm)
    worst = max(off, key=lambda name: off[name])
    loss = abs(found.loss - right.loss) / abs(right.loss)
    return {"loss": loss, "gradients": off[worst], "worst": worst}


@dataclass(frozen=True, slots=True)
class Flat:
    """A batch in one row: shapes [1, tokens], int64. Labels are the ids, and -100 where a document
    begins; positions begin again with each document."""

    ids: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, case: Case) -> "Flat":
        documents = case.documents()
        ids = torch.cat(documents)[None]
        positions = torch.cat([torch.arange(len(each)) for each in documents])[None]
        return cls(ids, ids.masked_fill(positions == 0, IGNORED), positions)
