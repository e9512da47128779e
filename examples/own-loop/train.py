"""A loop of your own: python train.py [FOLDER or hub name of a model] [TOKENS of a sequence]."""

import inspect
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import farspan


def main(name: str = "../smollm2", tokens: int = 1024, steps: int = 3) -> list[float]:
    """The loss of each step."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).train()
    text = Path(inspect.__file__).read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : steps * tokens].view(-1, 1, tokens)
    step = farspan.Step(model, "auto")  # chooses a schedule at the first call
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    losses = []
    for row in ids:
        optimizer.zero_grad()
        loss = step(row, row)  # forward and backward; gradients are in .grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
        print(f"loss {losses[-1]:.4f}")
    with torch.no_grad():
        logprobs = step.logprobs(row)[0]  # of each next token; the start of any other loss
    least = int(logprobs.argmin())
    print(f"least expected: {tokenizer.decode(row[0, least + 1])!r}, {logprobs[least]:.2f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
