"""`state_dict` and `load_state_dict` of a model with the flag on: those of the model without it, full tensors."""

from __future__ import annotations

from typing import Any

import torch

import gtp
from tests.megatron.training import Case, Job, environment

CASE = Case(gtp=2, steps=5)


def full_state(job: Job) -> dict[str, Any]:
    """Copies, whole."""
    found = {}
    for key, value in job.chunks[0].module.state_dict().items():
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        found[key] = value
    return found


def other_weights() -> dict[str, Any]:
    with environment(CASE.unsharded()):
        torch.manual_seed(11)
        return full_state(Job(CASE.unsharded()))


def loaded_in_the_middle(case: Case, state: dict[str, Any] | None, assign: bool = False) -> tuple[list[float], str]:
    """Losses of two steps, a load, and three steps; what the load said."""
    said = "loaded"
    with environment(case):
        job = Job(case)
        for step in range(case.steps):
            if step == 2 and state is not None:
                try:
                    job.chunks[0].module.load_state_dict(state, assign=assign)
                except gtp.GTPError as error:
                    said = f"{type(error).__name__}: {error}"
            job.step(step)
    return job.losses, said


def all_loads() -> dict[str, tuple[list[float], str]]:
    state = other_weights()
    return {
        "plain": loaded_in_the_middle(CASE.unsharded(), state),
        "copied": loaded_in_the_middle(CASE, state),
        "assigned": loaded_in_the_middle(CASE, state, assign=True),
        "left alone": loaded_in_the_middle(CASE, None),
    }


def test_other_weights_loaded_between_steps_are_used_at_once(ranks: Any):
    """C09: copied, a full state dict counts from the next forward on; assigned, it is refused and changes nothing."""
    for found in ranks(2).run(all_loads):
        assert found["plain"][1] == found["copied"][1] == "loaded"
        assert found["copied"][0] == found["plain"][0]
        assert found["copied"][0] != found["left alone"][0]
        assert "assign=True" in found["assigned"][1]
        assert found["assigned"][0] == found["left alone"][0]


CHOSEN = ["decoder.layers.1.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"]


def keys_and_partial_loads() -> dict[str, Any]:
    state = other_weights()
    with environment(CASE):
        job = Job(CASE)
        module, before = job.chunks[0].module, full_state(job)
        partial = module.load_state_dict({key: state[key] + 1 for key in CHOSEN}, strict=False)
        after = full_state(job)
        try:
            module.load_state_dict({**state, "decoder.layers.9.weight": torch.zeros(1)})
            strict = "loaded"
        except RuntimeError as error:
            strict = str(error)
        tensors = [key for key, value in before.items() if isinstance(value, torch.Tensor)]
        return {
            "plain": described(state),
            "sharded": described(module.state_dict()),
            "changed": [key for key in tensors if not torch.equal(before[key], after[key])],
            "right": [torch.equal(after[key], state[key] + 1) for key in CHOSEN],
            "unexpected": partial.unexpected_keys,
            "strict": strict,
        }


def described(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """In order: key, with shape and dtype of what is a tensor."""
    return [
        (key, (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value))
        for key, value in state.items()
    ]


def test_keys_and_shapes_are_those_without_the_flag_and_a_part_can_be_loaded(ranks: Any):
    """C34; C33: what is loaded are full tensors."""
    for found in ranks(2).run(keys_and_partial_loads):
        assert found["sharded"] == found["plain"]
        assert sorted(found["changed"]) == sorted(CHOSEN)
        assert found["right"] == [True, True]
        assert found["unexpected"] == []
        assert "Unexpected key(s) in state_dict" in found["strict"]
        assert "decoder.layers.9.weight" in found["strict"]
