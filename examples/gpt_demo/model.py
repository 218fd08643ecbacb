"""A Megatron-Core GPT and its optimizer, built as any Megatron user would. Whether gtp is behind it is one flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from gpt_demo.data import VOCAB
from gpt_demo.settings import Layout, Options, Sizes


def build(layout: Layout, sizes: Sizes, options: Options) -> tuple[DistributedDataParallel, Any]:
    """The model under Megatron's DistributedDataParallel, and its Adam."""
    config = transformer_config(layout, sizes, options)
    spec = get_gpt_layer_local_spec(num_experts=options.moe or None, normalization="RMSNorm")
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if options.mtp else None,
        vocab_size=VOCAB,
        max_sequence_length=sizes.seq,
        position_embedding_type="rope",
    )
    gpt.to(torch.cuda.current_device())
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.bf16, use_distributed_optimizer=options.distributed_optimizer
    )
    model = DistributedDataParallel(config, ddp, gpt)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=sizes.lr,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=0.0,
        bf16=options.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return model, get_megatron_optimizer(settings, [model])


def transformer_config(layout: Layout, sizes: Sizes, options: Options) -> TransformerConfig:
    """`tensor_parallel_num_weight_shards` is the flag; the rest is the model."""
    extra: dict[str, Any] = {}
    if options.moe:
        extra |= {
            "num_moe_experts": options.moe,
            "moe_ffn_hidden_size": sizes.hidden,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_num_weight_shards": layout.tp * layout.gtp,
        }
    if options.recompute:
        extra |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if options.mtp:
        extra |= {"mtp_num_layers": options.mtp}
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        tensor_model_parallel_size=layout.tp,
        tensor_parallel_num_weight_shards=layout.tp * layout.gtp,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bf16=options.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **extra,
    )


def memory(model: DistributedDataParallel, optimizer: Any) -> tuple[int, int, int]:
    """Bytes on this rank: (weights, gradients, optimizer state with its fp32 copies), each storage counted once."""
    parameters = list(model.parameters())
    masters = [p.main_param for p in parameters if getattr(p, "main_param", None) is not None]
    states = [getattr(o, "optimizer", o).state for o in getattr(optimizer, "chained_optimizers", [optimizer])]
    return (
        _storage_bytes(p.detach() for p in parameters),
        _storage_bytes(p.main_grad for p in parameters),
        _storage_bytes([*masters, *_tensors(states)]),
    )


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif hasattr(tree, "values"):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _storage_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
