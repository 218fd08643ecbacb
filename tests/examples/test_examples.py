"""The examples of the README run as a user would start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(script: str) -> str:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)


def test_plain_torch():
    out = torchrun("examples/plain_torch.py")
    assert "2 of 4 parameters sharded" in out
    assert "of the weights were there when they were needed" in out


def test_shard_any_model():
    assert "equal" in torchrun("examples/shard_any_model.py")


def test_fake_weight():
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/test_fake_weight.py")


def test_megatron_flag():
    run("examples/megatron_flag.py")
