"""Machines for tests of planning."""

from farspan.spec import Curve, MachineSpec, Rates


def slow_machine(**fields: object) -> MachineSpec:
    """Every rate another, so that no two terms can be mistaken for each other."""
    flat = {
        name: Curve(((1.0, rate),))
        for name, rate in (("matmul", 1e6), ("forward", 7e5), ("backward", 5e5))
    }
    rates = Rates(flat["matmul"], flat["forward"], flat["backward"], peak=2e6)
    values = {
        "name": "slow",
        "devices": 1,
        "device_bytes": 2**30,
        "host_bytes": 2**31,
        "rates": {"float32": rates, "bfloat16": rates, "float64": rates},
        "memory": 3e6,
        "fetch": 2e6,
        "evict": 1.5e6,
        "fetch_together": 1.3e6,
        "evict_together": 1.1e6,
        "host_memory": 9e6,
        "peer": 4e6,
        "network": 1e6,
        "latency": 1e-3,
        "overhead": 1e-4,
        "reserve": 1000,
        **fields,
    }
    return MachineSpec(**values)  # type: ignore[arg-type]
