"""Ways on one process: transformers' and TRL's packing, farspan."""

import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, TrainerCallback

import farspan
from benchmarks.peers.bed import Case, Flat, Found, of_model

CHUNK = 48  # of the sequence, shorter than a document
SCHEDULE = farspan.Schedule(chunk=CHUNK, groups=2, kv_block=64, loss_chunk_size=40)


def attention_of(case: Case) -> str:
    """SDPA, but for models of which transformers has none."""
    return "eager" if case.model == "windows and sinks" else "sdpa"


def flattened(case: Case, attention: str) -> Found:
    """transformers: DataCollatorWithFlattening, and the model with what it returns."""
    model = case.built(attention)
    batch = DataCollatorWithFlattening()([{"input_ids": ids.tolist()} for ids in case.documents()])
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return of_model(model, loss)


def eager(case: Case) -> Found:
    return flattened(case, "eager")


def sdpa(case: Case) -> Found:
    return flattened(case, "sdpa")


class Seen(TrainerCallback):
    """Keeps the gradients of a Trainer's first step."""

    def __init__(self, gathered: Callable[[nn.Module, float], Found] = of_model) -> None:
        self.gathered = gathered  # of a model whose gradients may be cut
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
        self.gradients = self.gathered(given["model"], 0.0).gradients


def trained(case: Case, model: nn.Module, seen: Seen, **options: Any) -> Found:
    """One step of TRL's SFTTrainer, without clipping; SFTConfig(**options)."""
    trl, datasets = import_module("trl"), import_module("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [ids.tolist() for ids in case.documents()]})
    size = options.pop("per_device_train_batch_size", 1)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            output_dir=folder,
            max_steps=1,
            logging_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            router_aux_loss_coef=0.0,
            per_device_train_batch_size=size,
            **options,
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=[seen],
        )
        loss = trainer.train().training_loss
    return Found(loss, seen.gradients)


def tokenizer() -> Any:
    """One that is not asked for anything but its special tokens: the rows are ids."""
    library, transformers = import_module("tokenizers"), import_module("transformers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    model = library.models.WordLevel(words, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer(model),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def packed(case: Case) -> Found:
    """TRL: SFTConfig(packing=True), whose strategy is bfd."""
    model = case.built(attention_of(case))
    return trained(case, model, Seen(), packing=True, max_length=512)


def padding_free(case: Case) -> Found:
    """TRL: SFTConfig(padding_free=True), the documents as one batch."""
    model = case.built(attention_of(case))
    size = len(case.lengths())
    return trained(
        case, model, Seen(), padding_free=True, max_length=None, per_device_train_batch_size=size
    )


def far(case: Case) -> Found:
    """farspan on one process."""
    model = case.built(attention_of(case))
    loss = farspan.Step(model, SCHEDULE)(*batch_of(case))
    return of_model(model, loss)


def batch_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and the number of each token's document: shapes [1, tokens]."""
    flat = Flat.of(case)
    numbers = [torch.full((n,), i) for i, n in enumerate(case.lengths())]
    return flat.ids, flat.ids.clone(), torch.cat(numbers)[None]
