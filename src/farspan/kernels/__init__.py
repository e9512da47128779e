"""Fused Triton kernels for a model's memory-bound operations.

    norm      RMS norm of rows or of heads, and its backward
    gate      act(gate) * up of a gated MLP, and its backward
    rotary    rotary position embedding of queries and keys, and its transpose
    loss      cross-entropy, whose gradient overwrites the logits
    joining   merge a part into a softmax (`merge_`); add a part to a sum (`add_`)

Each reads its inputs once (the loss twice) and writes its results once. Arithmetic is fp32 for
every dtype. Values that PyTorch rounds between two of its kernels stay fp32 here, unless the
docstring says that they are rounded. No atomics: the same inputs give the same bits.
`launch.fused_for` tells the devices that run them. Importing the package does not import Triton.
The formulas in PyTorch are in `reference`, and those of joining in `farspan.attention.backends`.
"""
