"""A Hugging Face Llama, which never heard of gtp, trains sharded as it trains data-parallel."""

from __future__ import annotations

import pytest
import torch

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide

# Five AdamW steps. Four ranks: replicated norms are added in the backend's order. Tied: autograd adds the two uses of
# the table on each rank and then ranks are added; gtp adds ranks for each use and then uses. Both are fp32 roundings.
BOUND = {"rtol": 1e-5, "atol": 1e-6}


def _llama(tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,  # no number of ranks divides it
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _tokens(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(67, (2, 6), generator=generator) for _ in range(count)]


def _next_token(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def _trained(tied, exact, recompute):
    bound = {} if exact else BOUND

    def build():
        model = _llama(tied)
        if recompute:
            model.gradient_checkpointing_enable()
        return model

    twins = SideBySide(build, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **bound)
    assert (twins.sharded.lm_head.weight is twins.sharded.model.embed_tokens.weight) == tied
    sharded = [n for n, p in twins.sharded.named_parameters() if isinstance(p, gtp.GTPWeight)]
    assert len(sharded) == 2 * 7 + (1 if tied else 2)
    # bit for bit at any number of ranks: a forward adds nothing over ranks
    tokens = _tokens(99, twins.size)[rank()]
    assert torch.equal(twins.sharded(input_ids=tokens).logits, twins.plain(input_ids=tokens).logits)
    losses = [twins.step(_tokens(step % 2, twins.size), _next_token).item() for step in range(5)]
    assert losses[4] < losses[0]
    assert any(phase == "recompute" for _, phase in twins.runtime.trace()) == recompute
    if exact:
        assert torch.equal(twins.sharded(input_ids=tokens).logits, twins.plain(input_ids=tokens).logits)


@pytest.mark.parametrize(
    "size, tied, exact, recompute",
    [
        (2, False, True, False),
        (2, False, True, True),
        (2, True, False, True),
        (4, False, False, False),
        (4, True, False, False),
    ],
)
def test_a_hugging_face_llama_trains_as_data_parallelism(ranks, size, tied, exact, recompute):
    ranks(size).run(_trained, tied, exact, recompute)
