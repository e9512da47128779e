"""The same small models and batches through farspan and through what others install, each against
plain autograd on the documents one by one.

    python -m benchmarks.peers [--out FILE] [--ways WAY ...]

Two ranks are two processes over gloo, so that a CPU is enough. A way whose packages are not there
is skipped by name. Beside farspan's own dependencies, everything is run by

    pip install trl==1.16.0 accelerate==1.15.0 deepspeed==0.19.8

`python -m benchmarks.pages peers` puts the tables into docs/explanation/comparison.md.
"""
