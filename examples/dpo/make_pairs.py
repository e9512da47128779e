"""Writes pairs.jsonl: requests, each with a polite answer, which is preferred, and a curt one."""

import json
import random
import sys
from pathlib import Path

THINGS = "apples", "pears", "plums", "nuts", "figs"
POLITE = "Gladly, here are {}.", "Of course: {}.", "With pleasure, {} for you."
CURT = "{}. Take them.", "There, {}.", "If I must. {}."


def main(folder: Path, pairs: int = 300) -> None:
    """So many pairs, into `folder`."""
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(pairs):
            what = f"{draw.randrange(2, 100)} {draw.choice(THINGS)}"
            pair = {
                "prompt": f"Bring me {what}. ",
                "chosen": draw.choice(POLITE).format(what),
                "rejected": draw.choice(CURT).format(what),
            }
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
