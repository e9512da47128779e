"""CUDA's paths without a GPU: a stand-in for its runtime, driver and NCCL, and for its operators.

    python -m tests.standin python -m pytest -m gpu -W default
    python -m tests.standin farspan train run.yaml

PyTorch must be one that is built for CUDA. Its allocator, streams, events, dispatcher and autograd
are the real ones; device memory is main memory, whatever is asked of a stream is done at once, and
operators compute by the CPU's kernels on the same memory, attention by `tests.attention.vendor`.
Triton's kernels are interpreted, compiled ones are not compiled. So it shows what is called, in
which order and with which memory. It shows nothing about speed, about what really runs beside what,
or about the kernels of a GPU.
"""
