"""`gtp.ops.embedding`: the bits of `F.embedding`, one gather, no re-gather. Fakes in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gtp.errors import ProtocolError, UnsupportedError
from gtp.ops import embedding
from gtp.testing.fakes import VIOLATIONS, FakeDistributedWeight, Violation, violating_weight
from tests.ops.managed import exact_fake, plain_weight

FORWARD, BUFFER, FINALIZE = "materialize_group_for_forward", "grad_buffer", "finalize_group_grads"

IDS = {
    "2-d": torch.tensor([[0, 3, 3], [5, 0, 1]]),
    "1-d int32": torch.tensor([2, 2, 2, 4], dtype=torch.int32),
    "one": torch.tensor(3),
    "none": torch.zeros(2, 0, dtype=torch.int64),
    "transposed": torch.tensor([[0, 3, 3], [5, 0, 1]]).t(),
    "many": torch.arange(200).remainder(6).view(4, 50),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"padding_idx": -6}, {"scale_grad_by_freq": True}], ids=str
)
def test_bits_are_those_of_torch(ids: torch.Tensor, dtype: torch.dtype, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    full = torch.randn(6, 5, dtype=dtype)
    fake, plain = exact_fake(full), plain_weight(full)
    y, wanted = embedding(ids, fake, **options), F.embedding(ids, plain, **options)
    assert torch.equal(y, wanted)
    dy = torch.randn(y.shape, dtype=dtype)
    y.backward(dy)
    wanted.backward(dy)
    assert torch.equal(fake.grad, plain.grad)
    assert fake.methods == [FORWARD, BUFFER, FINALIZE]


def test_a_strided_gradient_gives_the_bits_of_torch() -> None:
    full, ids = torch.randn(6, 5), IDS["2-d"]
    fake, plain = exact_fake(full), plain_weight(full)
    for table, lookup in ((fake, embedding), (plain, F.embedding)):
        lookup(ids, table).transpose(0, 2).contiguous().cos().sum().backward()
    assert torch.equal(fake.grad, plain.grad)


def test_one_lookup_tells_the_route() -> None:
    table = FakeDistributedWeight(torch.arange(12.0).reshape(4, 3), rows=(1, 3))
    y = embedding(torch.tensor([2, 2, 0]), table)
    assert torch.equal(y, 2 * torch.tensor([[6.0, 7, 8], [6, 7, 8], [0, 1, 2]]))
    y.sum().backward()
    assert torch.equal(table.grad, torch.tensor([[0.0, 0, 0], [10, 10, 10]]))
    assert table.calls[2].buffers == (True,)
    assert table.live_full_weights == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_nothing_is_kept(mode: type) -> None:
    table = exact_fake(torch.randn(4, 3))
    with mode():
        y = embedding(torch.tensor([1]), table)
    assert y.grad_fn is None
    assert table.methods == [FORWARD]
    assert table.live_full_weights == 0


def test_a_frozen_table_has_no_graph() -> None:
    assert not embedding(torch.tensor([1]), exact_fake(torch.randn(4, 3), requires_grad=False)).requires_grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant: bool) -> None:
    table, plain = exact_fake(torch.ones(4, 3)), plain_weight(torch.ones(4, 3))
    x = torch.ones(3, requires_grad=True)  # reentrant checkpoints need an input that requires grad
    ids = torch.tensor([1, 1, 2])
    checkpoint(lambda x: (embedding(ids, table) * x).exp(), x, use_reentrant=use_reentrant).sum().backward()
    (F.embedding(ids, plain) * x).exp().sum().backward()
    assert torch.equal(table.grad, plain.grad)


def test_a_wider_buffer_gets_the_converted_gradient() -> None:
    table = exact_fake(torch.ones(4, 3).bfloat16(), buffer_dtype=torch.float32, mode="main_grad")
    embedding(torch.tensor([1, 1]), table).sum().backward()
    assert torch.equal(table.main_grad, torch.tensor([0.0, 2, 0, 0]).unsqueeze(1).expand(4, 3))


def test_a_plain_table_takes_torchs_own_path() -> None:
    plain = plain_weight(torch.randn(4, 3))
    assert embedding(torch.tensor([1]), plain, sparse=True).sum().backward() is None
    assert plain.grad.is_sparse
    clipped = plain_weight(10 * torch.ones(4, 3))
    assert torch.allclose(embedding(torch.tensor([1]), clipped, max_norm=1.0).norm(), torch.ones(()), atol=1e-5)


def test_main_grad_collects_what_grad_would() -> None:
    table, plain = plain_weight(torch.ones(4, 3)), plain_weight(torch.ones(4, 3))
    table.main_grad, table.grad_added_to_main_grad = torch.zeros(4, 3), False
    for ids in (torch.tensor([1, 1]), torch.tensor([0, 3])):
        embedding(ids, table).cos().sum().backward()
        F.embedding(ids, plain).cos().sum().backward()
    assert torch.equal(table.main_grad, plain.grad)
    assert table.grad_added_to_main_grad


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_norm": 1.0}, r"'wte.weight'.*max_norm=1.0 rescales rows.*Use max_norm=None"),
        ({"sparse": True}, r"'wte.weight'.*sparse gradient.*Use sparse=False"),
    ],
)
def test_what_needs_the_whole_table_is_refused_before_anything_is_asked(
    options: dict[str, object], message: str
) -> None:
    table = exact_fake(torch.randn(4, 3), label="wte.weight")
    with pytest.raises(UnsupportedError, match=message):
        embedding(torch.tensor([1]), table, **options)
    assert table.methods == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_double_backward_is_refused() -> None:
    table = exact_fake(torch.randn(4, 3))
    x = torch.ones(1, 3, requires_grad=True)
    y = (embedding(torch.tensor([1]), table) * x).sum()
    with pytest.raises(UnsupportedError, match="double backward"):
        y.backward(create_graph=True)
    assert table.methods == [FORWARD]


def test_a_table_that_is_no_matrix_and_distributed_indices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="embedding takes a 2-d table"):
        embedding(torch.tensor([0]), exact_fake(torch.randn(3)))
    with pytest.raises(UnsupportedError, match="given to embedding as input"):
        embedding(exact_fake(torch.zeros(2, 2)), torch.randn(4, 3))


@pytest.mark.parametrize(
    "violation", [v for v in VIOLATIONS if "backward" not in v.method], ids=lambda v: f"{v.method}-{v.kind}"
)
def test_every_broken_rule_is_a_protocol_error(violation: Violation) -> None:
    table = violating_weight(torch.randn(4, 3), violation, rows=(0, 2), label="wte.weight")
    with pytest.raises(ProtocolError, match=f"{violation.method} of weight 'wte.weight'"):
        embedding(torch.tensor([1]), table).sum().backward()
