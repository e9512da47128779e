"""Writes pairs.jsonl: requests, each with a polite answer, which is preferred, and a curt one.

python make_pairs.py [BYTES of a manual before each request]
"""

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

THINGS = "apples", "pears", "plums", "nuts", "figs"
POLITE = "Gladly, here are {}.", "Of course: {}.", "With pleasure, {} for you."
CURT = "{}. Take them.", "There, {}.", "If I must. {}."


def main(folder: Path, pairs: int = 300, before: int = 0) -> None:
    """So many pairs, into `folder`, each with so many bytes of Python's manual before it."""
    draw, manual = random.Random(0), "".join(topics.values()).encode("ascii", "ignore").decode()
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(pairs):
            what = f"{draw.randrange(2, 100)} {draw.choice(THINGS)}"
            begin = draw.randrange(len(manual) - before) if before else 0
            pair = {
                "prompt": f"{manual[begin : begin + before]}Bring me {what}. ",
                "chosen": draw.choice(POLITE).format(what),
                "rejected": draw.choice(CURT).format(what),
            }
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    folder = Path(__file__).parent
    main(folder) if len(sys.argv) == 1 else main(folder, 60, int(sys.argv[1]))
