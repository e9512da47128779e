"""Copies between tiers move bytes and count them by direction."""

import torch

from farspan.transfer.copies import CopyEngine


def test_copies_are_counted_by_direction() -> None:
    copies = CopyEngine(torch.device("cpu"))
    host, device = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    copies.fetch(device, host)
    assert torch.equal(device, host)
    device.mul_(2)
    copies.evict(host[:1], device[:1])
    assert host.tolist() == [[0.0, 2.0, 4.0], [3.0, 4.0, 5.0]]
    assert (copies.fetched, copies.evicted) == (24, 12)
