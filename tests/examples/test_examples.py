"""The examples of the README run as a user would start them."""

from __future__ import annotations

import pytest

from tests.processes import Ended


@pytest.mark.process("examples/plain_torch.py", ranks=2)
def test_plain_torch(process: Ended):
    assert "2 of 4 parameters sharded" in process.stdout
    assert "of the weights were there when they were needed" in process.stdout


@pytest.mark.process("examples/shard_any_model.py", ranks=2)
def test_shard_any_model(process: Ended):
    assert "equal" in process.stdout


@pytest.mark.process("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_fake_weight.py")
def test_fake_weight(process: Ended):
    assert "1 passed" in process.stdout


@pytest.mark.process("examples/megatron_flag.py")
def test_megatron_flag(process: Ended):
    assert process.code == 0  # it has assertions of its own
