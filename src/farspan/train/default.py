"""The run of `farspan train` without arguments: small, real, and the same everywhere."""

from farspan.data.config import DataConfig, SourceKind
from farspan.train.config import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)

CONTEXT = 8192


def default_run() -> RunConfig:
    """A Qwen2-shaped model of bytes learns Python from the standard library's sources.

    Four layers with two queries a K,V head, 8,192 tokens in four chunks, two groups.
    """
    model = {
        "model_type": "qwen2",
        "vocab_size": 264,  # 256 bytes and the end of a document, padded to a multiple of 8
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
    }
    return RunConfig(
        model=ModelConfig(config=model),
        data=DataConfig(source=SourceKind.STDLIB, held_out=0.05, tokenizer="bytes"),
        folder="runs/default",
        steps=80,
        context=CONTEXT,
        schedule=ScheduleConfig(strategy="grouped", chunk=2048),
        optimizer=OptimizerConfig(lr=3e-3, warmup=8),
        evaluation=EvaluationConfig(every=20, sequences=4),
        checkpoints=CheckpointConfig(every=20, keep=2),
    )
