"""A unit test without ranks: a fake weight shows which way a tensor went. Run with pytest."""

import torch

from gtp.modules import Linear
from gtp.testing.fakes import FakeDistributedWeight


def test_forward_and_backward_take_the_weight_from_its_owner():
    full = torch.randn(6, 4)
    layer = Linear(4, 6, bias=False)
    layer.weight = FakeDistributedWeight(full, rows=(0, 3))  # this "rank" holds rows 0 to 3
    x = torch.randn(2, 4, requires_grad=True)

    layer(x).sum().backward()

    torch.testing.assert_close(x.grad, torch.ones(2, 6) @ (3 * full))  # re-gathered: scale 3
    torch.testing.assert_close(layer.weight.grad, 5 * (torch.ones(6, 2) @ x.detach())[:3])  # finalized: scale 5
