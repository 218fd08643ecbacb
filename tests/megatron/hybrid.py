"""Megatron's HybridModel from local layers, on CPU: attention, Mamba and MLP layers.

Mamba's kernels need a GPU, so the selective scan is a loop over time here. The rest of the mixer, its projections and
its convolution are Megatron's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int, *,
    D: torch.Tensor, z: torch.Tensor, dt_bias: torch.Tensor, dt_softplus: bool, return_final_states: bool, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """What `mamba_chunk_scan_combined` computes: state-space duality, one step at a time.

    Args:
        x, z: `[batch, time, heads, head_dim]`.
        dt: `[batch, time, heads]`; `dt_bias` and `D` `[heads]`, `a` `[heads]`, negative.
        b, c: `[batch, time, groups, state]`.
    """
    assert dt_softplus
    assert not return_final_states
    dt = torch.nn.functional.softplus(dt + dt_bias)
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (b, c))
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        outputs.append((state * c[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1) * torch.nn.functional.silu(z)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Megatron's MambaMixer gets `scan` for its kernels, and HybridStack a final norm that needs no package."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with (
        mock.patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
        mock.patch.object(mamba_mixer, "mamba_chunk_scan_combined", scan),
        mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm),
        mock.patch.object(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False),
    ):
        yield


def stack_spec() -> Any:
    """`hybrid_stack_spec` from local layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    whole = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda)
    mixer = ModuleSpec(
        module=MambaMixer,
        params={"expand": 1, "rmsnorm": False, "chunk_size": 4},
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
        ),
    )
