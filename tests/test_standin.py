"""The stand-in for CUDA is only for a PyTorch that is built for CUDA, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has what it asks for")
def test_a_pytorch_without_cuda_is_refused() -> None:
    asked = [sys.executable, "-m", "tests.standin", "true"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"PyTorch {torch.__version__} is built without CUDA" in done.stderr
