"""Writes `stretched`, the model with its rotary positions stretched, and texts longer than it knew.

python prepare.py [FOLDER of a model] [FACTOR]
"""

import json
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELD_OUT = "inspect"
LONG = 45_000  # bytes: more than 10K tokens
MISSING = """\
{} is no folder of a model. Make that of these examples by

    python ../model.py

or name another one: `python prepare.py FOLDER`."""


def stretch(model: Path, factor: float, folder: Path) -> None:
    """Links to all files of the model but its configuration, which gets YaRN positions. It ends the
    program with how to make the model where there is none."""
    if not (model / "config.json").is_file():
        sys.exit(MISSING.format(model))
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    positions = config["max_position_embeddings"]
    config["max_position_embeddings"] = int(factor * positions)
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positions,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_texts(folder: Path) -> None:
    """The standard library's long modules; one of them is not trained on."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if file.stat().st_size >= LONG:
            part = folder if file.stem == HELD_OUT else folder / "train"
            (part / f"{file.stem}.txt").write_text(file.read_text("utf-8"), "utf-8")


def main(model: Path = HERE.parent / "smollm2", factor: float = 4.0) -> None:
    """Both, beside this file."""
    stretch(model, factor, HERE / "stretched")
    write_texts(HERE / "text")


if __name__ == "__main__":
    main(*(kind(given) for kind, given in zip((Path, float), sys.argv[1:], strict=False)))
