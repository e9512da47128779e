"""TRL's trainers on long sequences: python train.py sft|dpo|kto|reward|grpo [--model FOLDER]."""

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import farspan

KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
}


def rows(loss: str, count: int = 64) -> list[dict[str, Any]]:
    """Long lists of numbers, and the largest of them as the good answer."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        numbers = [draw.randrange(1000) for _ in range(draw.randrange(50, 100))]
        prompt, good, bad = f"{numbers} ", f"{max(numbers)}.", f"{min(numbers)}."
        found.append(
            {
                "sft": {"prompt": prompt, "completion": good},
                "dpo": {"prompt": prompt, "chosen": good, "rejected": bad},
                "kto": {"prompt": prompt, "completion": (bad, good)[number % 2]},
                "reward": {"prompt": prompt, "chosen": good, "rejected": bad},
                "grpo": {"prompt": prompt},
            }[loss]
        )
        if loss == "kto":
            found[-1]["label"] = bool(number % 2)
    return found


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")


def small_model(loss: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """With random weights, for a machine without a GPU."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if loss == "reward" else AutoModelForCausalLM
    return kind.from_config(config)


def digits(completions: list[str], **_: Any) -> list[float]:
    """GRPO's reward: the share of digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def main(arguments: list[str] | None = None) -> Any:
    """The trainer, after its steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loss", choices=KINDS)
    parser.add_argument("--model", help="a folder with a model; a small one with random weights")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=128, help="tokens computed at a time")
    parser.add_argument("--ulysses", type=int, default=1, help="GPUs that share a sequence")
    parser.add_argument("--folder", default="run")
    given = parser.parse_args(arguments)
    trainer, config = KINDS[given.loss]
    further: dict[str, Any] = {}
    if given.model:
        tokenizer, model = AutoTokenizer.from_pretrained(given.model), given.model
    else:
        tokenizer = byte_tokenizer()
        model = small_model(given.loss, tokenizer)
    if given.loss in ("dpo", "kto") and not given.model:
        further["ref_model"] = small_model(given.loss, tokenizer)
    if given.loss == "grpo":
        further["reward_funcs"] = digits
    long = type("Long", (farspan.LongContext, trainer), {})(
        model=model,
        args=config(
            given.folder,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            **({"num_generations": 4, "max_completion_length": 16} if given.loss == "grpo" else {}),
        ),
        train_dataset=Dataset.from_list(rows(given.loss)),
        processing_class=tokenizer,
        schedule=farspan.Schedule(chunk=given.chunk, groups=2),
        layout=farspan.Layout(ulysses=given.ulysses) if given.ulysses > 1 else None,
        **further,
    )
    long.train()
    return long


if __name__ == "__main__":
    main()
