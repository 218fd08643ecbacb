"""The choice of a transport: never silent, refused at the call that asked for what cannot be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gtp
from gtp.runtime.select import choose_transport


def chosen(name: str) -> tuple[str, str]:
    transport, reason = choose_transport(gtp.GTPConfig(transport=name), [dist.group.WORLD], torch.device("cpu"))
    return transport.name, reason


def refusal() -> str:
    model = nn.Linear(4, 4)
    with pytest.raises(gtp.UnsupportedError) as caught:
        gtp.shard_model(model, dist.group.WORLD, config=gtp.GTPConfig(transport="copy_engine"))
    assert type(model.weight) is nn.Parameter  # nothing was changed
    return str(caught.value)


def test_auto_says_why_it_is_not_the_copy_engine(ranks) -> None:  # type: ignore[no-untyped-def]
    name, reason = ranks(2).run(chosen, "auto")[0]
    assert name == "process_group"
    assert reason == "the copy engine does not serve here: the weights are on cpu, which has no copy engines"


def test_what_was_asked_for_is_taken(ranks) -> None:  # type: ignore[no-untyped-def]
    assert ranks(2).run(chosen, "process_group") == [("process_group", "asked for")] * 2


def test_the_copy_engine_on_the_cpu_is_refused_when_the_model_is_sharded(ranks) -> None:  # type: ignore[no-untyped-def]
    for message in ranks(2).run(refusal):
        assert "on cpu, which has no copy engines" in message
        assert '"process_group"' in message
