"""Writes chats.jsonl: chapters of Python's reference manual, and a question about one of them.

python prepare.py [BYTES of the chapters in a chat]
"""

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

HERE = Path(__file__).resolve().parent
BYTES = 6_000  # about 1.5K tokens


def chat(draw: random.Random, largest: int) -> list[dict[str, str]]:
    """Chapters up to so many bytes, in any order; the answer is how one of them begins."""
    names, size = [], 0
    for name in draw.sample(sorted(topics), len(topics)):
        if size + len(topics[name]) <= largest:
            names.append(name)
            size += len(topics[name])
    asked = draw.choice(names)
    manual = "\n\n".join(f"Chapter {name}\n\n{topics[name].strip()}" for name in names)
    begins = topics[asked].split("\n\n")[2 if "***" in topics[asked][:200] else 0]
    return [
        {"role": "user", "content": f"{manual}\n\nHow does the chapter {asked} begin?"},
        {"role": "assistant", "content": " ".join(begins.split())},
    ]


def main(largest: int = BYTES, chats: int = 60) -> None:
    """So many chats, into this folder."""
    draw = random.Random(0)
    with (HERE / "chats.jsonl").open("w") as file:
        for _ in range(chats):
            file.write(json.dumps({"messages": chat(draw, largest)}) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
