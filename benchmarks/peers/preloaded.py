"""What children of `processes` are forked with: imports of several seconds."""

import os
import sys
from contextlib import suppress
from importlib import import_module

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

for name in ("benchmarks.peers.processes", "transformers.trainer", "datasets", "deepspeed"):
    with suppress(ImportError):
        import_module(name)
with suppress(ImportError):
    import_module("trl").SFTTrainer  # noqa: B018 - it is imported when it is first read
if "deepspeed" in sys.modules:
    # All ranks exchange over gloo: its exchange in shared memory would be compiled first.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
