"""`torch.autograd.grad` with respect to sharded weights: reduced shards, returned and not accumulated."""

from __future__ import annotations

import pytest
import torch

import gtp
from gtp.testing.ranks import rank
from tests.reference import data_parallel_backward
from tests.weights.test_shard_model import batches, language_loss, pair


def _returned_gradients():
    plain, sharded, _ = pair()
    every = batches(0)
    data_parallel_backward(plain, every, language_loss)
    names, weights = zip(
        *[(n, p) for n, p in sharded.named_parameters() if isinstance(p, gtp.GTPWeight)][:3], strict=True
    )
    grads = torch.autograd.grad(language_loss(sharded, every[rank()]), weights)
    wanted = dict(plain.named_parameters())
    for name, weight, grad in zip(names, weights, grads, strict=True):
        assert weight.grad is None
        assert torch.equal(grad[weight.layout.valid_slice], wanted[name].grad[weight.layout.shard_slice])
    # and an ordinary backward afterwards is an ordinary backward
    language_loss(sharded, every[rank()]).backward()
    assert all(p.grad is not None for n, p in sharded.named_parameters() if wanted[n].grad is not None)


def test_gradients_are_reduced_and_returned(ranks):
    ranks(2).run(_returned_gradients)


def _graphed_layers(transport):
    from tests.weights.test_gpu_training import device_and_group

    device, group = device_and_group()
    torch.manual_seed(3)
    plain, sharded = [
        torch.nn.Sequential(*[torch.nn.Linear(64, 64, device=device) for _ in range(3)]) for _ in range(2)
    ]
    sharded.load_state_dict(plain.state_dict())
    gtp.shard_model(sharded, group, config=gtp.GTPConfig(transport=transport))
    sample = torch.randn(8, 64, device=device, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(
        tuple(sharded), tuple((sample.clone().detach().requires_grad_(),) for _ in sharded)
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        every = [torch.randn(8, 64, generator=generator).to(device).requires_grad_() for _ in range(2)]
        data_parallel_backward(plain, every, lambda m, x: m(x).square().mean())
        x = every[rank()]
        for layer in graphed:
            x = layer(x)
        x.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, reference in zip(sharded, plain, strict=True):
            weight = mine.weight
            torch.testing.assert_close(
                weight.shard[weight.layout.valid_slice],
                reference.weight[weight.layout.shard_slice].detach(),
                rtol=1e-4,
                atol=1e-5,  # SGD in fp32; cuBLAS may choose another kernel under capture
            )
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["copy_engine"])
def test_layers_graphed_one_by_one_train_with_weights_that_change(ranks, transport):
    ranks(2).run(_graphed_layers, transport)
