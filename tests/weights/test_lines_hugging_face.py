"""Hugging Face models whose weights are not all used by F.linear: `unshard="*"` shards every parameter of them."""

from __future__ import annotations

import pytest
import torch

import gtp
from gtp.testing.ranks import rank
from tests.weights.side_by_side import SideBySide

# SGD in fp32. Tied tables: each use is reduced by itself, where autograd adds the uses first.
BOUND = {"rtol": 1e-5, "atol": 2e-6}


def _gpt2():
    """`addmm` with a weight that is stored transposed; a tied table."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=4, n_positions=16, **drops))


def _mixtral():
    """All experts of a layer are one tensor, of which the chosen ones are taken."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
    )
    return MixtralForCausalLM(config)


def _falcon():
    """A Linear that multiplies by `weight.T` itself."""
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(FalconConfig(vocab_size=67, hidden_size=16, num_hidden_layers=2, num_attention_heads=4))


def _next_token(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _trained(build):
    twins = SideBySide(build, unshard="*", **BOUND)
    assert all(isinstance(p, gtp.GTPWeight) for p in twins.sharded.parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        twins.step([torch.randint(67, (2, 6), generator=generator) for _ in range(twins.size)], _next_token)
    whole, mine = (sum(p.numel() for p in model.parameters()) for model in (twins.plain, twins.sharded))
    return mine / whole


def _saved(folder):
    torch.manual_seed(7)
    model = _mixtral()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    gtp.shard_model(model, torch.distributed.group.WORLD, unshard="*")
    with pytest.raises(gtp.GTPError, match=r"gtp\.full_state_dict\(model\)"):
        model.save_pretrained(f"{folder}/refused")
    full = gtp.full_state_dict(model, rank0_only=True)
    if rank() == 0:
        model.save_pretrained(folder, state_dict=full)
        loaded = type(model).from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    tokens = torch.arange(3, 9)[None]
    plain = _mixtral()
    plain.load_state_dict(wanted)
    greedy = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **greedy), plain.generate(tokens, **greedy))


def test_a_sharded_model_generates_and_is_saved_in_hugging_faces_format(ranks, tmp_path):
    ranks(2).run(_saved, str(tmp_path))


@pytest.mark.parametrize("build", [_gpt2, _mixtral, _falcon])
def test_all_of_the_model_is_sharded_and_trains_as_data_parallelism(ranks, build):
    assert max(ranks(2).run(_trained, build)) < 0.52
