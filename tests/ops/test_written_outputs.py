"""What the ops give may be written in place, as what torch's own give: `relu_`, `x += residual`, rotary embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from gtp.ops import embedding, grouped_linear, layernorm_linear, linear
from gtp.testing.fakes import FakeDistributedWeight
from tests.ops.managed import exact_fake, plain_weight

LAYOUTS = {
    "1-d": lambda: torch.randn(6),
    "2-d": lambda: torch.randn(8, 6),
    "3-d": lambda: torch.randn(2, 4, 6),
    "3-d batch second": lambda: torch.randn(4, 2, 6).transpose(0, 1),
    "4-d": lambda: torch.randn(2, 2, 2, 6),
    "no rows": lambda: torch.randn(2, 0, 6),
}

Op = Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor | None], torch.Tensor]


def _grouped(x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    rows = x[..., 0].numel()
    splits = [rows // 2, rows // 4]
    return grouped_linear(x, splits, weights, None if bias is None else [bias, bias])


OPS: dict[str, Op] = {
    "linear": lambda x, w, b: linear(x, w[0], b),
    "layernorm_linear": lambda x, w, b: layernorm_linear(x, torch.ones(6), torch.zeros(6), w[0], b),
    "grouped_linear": _grouped,
}


def written(op: Op, x: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None) -> list[torch.Tensor]:
    """The output after three ways to write in place, and the gradients through them."""
    x = x.detach().requires_grad_()
    y = op(x, weights, bias)
    y += 1.0
    y[..., :2].mul_(3.0)
    y.relu_()
    y.square().sum().backward()
    return [y.detach(), x.grad, *[w.grad for w in weights if w.grad is not None]]


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_as_a_plain_output(op: str, layout: str, bias: bool, trainable: bool) -> None:
    torch.manual_seed(0)
    x, fulls = LAYOUTS[layout](), [torch.randn(5, 6) for _ in range(2 if op == "grouped_linear" else 1)]
    added = torch.randn(5) if bias else None
    group = FakeDistributedWeight.make_group(
        fulls, scale_forward=1, scale_backward=1, scale_finalize=1, requires_grad=trainable
    )
    got = written(OPS[op], x, list(group), added)
    wanted = written(OPS[op], x, [plain_weight(full, trainable) for full in fulls], added)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_positions_are_added_to_a_lookup_in_place() -> None:
    full, ids, positions = torch.randn(7, 4), torch.tensor([[1, 5, 1], [0, 2, 6]]), torch.randn(3, 4)
    grads = []
    for lookup, table in ((embedding, exact_fake(full)), (F.embedding, plain_weight(full))):
        x = lookup(ids, table)
        x += positions
        x.mul_(2.0).square().sum().backward()
        grads.append((x.detach(), table.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_the_input_that_backward_needs_is_still_protected() -> None:
    """Writing to the input of the next op is caught by its version, as between torch's own."""
    linear_ = functools.partial(linear, weight=exact_fake(torch.randn(6, 6)), bias=torch.randn(6))
    y = linear_(torch.randn(2, 4, 6))
    z = linear_(y)
    y.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
