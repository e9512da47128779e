"""Passes over memory that a model makes beside its products, each fused into one Triton kernel.

    norm      RMS norm of rows or of heads, and its backward
    gate      act(gate) * up of a gated MLP, and its backward
    rotary    rotary position embedding of queries and keys, and its transpose
    loss      cross-entropy, whose gradient takes the place of the logits
    joining   a part joins a softmax (`merge_`); a part is added to a sum (`add_`)

All are bound by memory: each reads its inputs once (the loss twice) and writes its results once.
Arithmetic is fp32 whatever the dtype; what PyTorch rounds between two of its kernels stays fp32
here, unless the docstring says that it is rounded. No atomics: the same inputs give the same bits.
`launch.fused_for` says where they run. Importing the package does not import Triton. The formulas
in PyTorch are in `reference`, and those of joining in `farspan.attention.backends`.
"""
