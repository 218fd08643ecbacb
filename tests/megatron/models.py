"""The models that a `Case` describes, made as a Megatron user makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.megatron import hybrid

if TYPE_CHECKING:
    from tests.megatron.training import Case

VOCAB, SEQ = 96, 16


def model_config(case: Case) -> Any:
    """`TransformerConfig` with the flag as `case` sets it."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if case.mla else TransformerConfig
    options: dict[str, Any] = {}
    if case.experts:
        options |= {
            "num_moe_experts": case.experts,
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": case.te,
        }
        if case.shared_expert:
            options["moe_shared_expert_intermediate_size"] = 24
    if case.recompute is not None:
        options["recompute_granularity"] = case.recompute
        if case.recompute == "full":
            options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if case.mtp:
        options |= {"mtp_num_layers": case.mtp}
    if case.gqa:
        options["num_query_groups"] = 2
    if case.mla:
        options |= {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
            "qk_layernorm": True,
        }
    if case.hybrid is not None:
        options |= {"is_hybrid_model": True, "mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
        options |= {"use_mamba_mem_eff_path": False}
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    return kind(
        num_layers=len(case.hybrid) if case.hybrid is not None else case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=40,
        num_attention_heads=4,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        sequence_parallel=case.sequence_parallel,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        tensor_parallel_num_weight_shards=case.tp * case.gtp,
        expert_tensor_parallel_num_weight_shards=(case.etp or case.tp) * case.egtp if case.experts else None,
        add_bias_linear=case.bias,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=case.cpu_init,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=case.per_token,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.bf16,
        **options,
    )


def bare_models(case: Case, config: Any, **spec_options: Any) -> list[Any]:
    """The model, or its chunks under interleaved pipelining. `spec_options` go to the local layer spec."""
    if case.hybrid is not None:
        return [hybrid_model(case, config)]
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    spec = get_gpt_layer_local_spec(
        num_experts=case.experts or None,
        multi_latent_attention=case.mla,
        normalization="RMSNorm",
        qk_layernorm=case.mla,
        **spec_options,
    )
    if case.te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=case.experts or None, moe_grouped_gemm=bool(case.experts)
        )
    if case.mla or case.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    if case.sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
        layers = get_num_layers_to_build(config)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=SequenceParallelRMSNorm)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if case.mtp else None
    models = []
    for stage in range(case.vpp or 1):
        virtual = {"vp_stage": stage} if case.vpp else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=case.vpp is None, **virtual)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=case.vpp is None, **virtual)
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=VOCAB,
                max_sequence_length=SEQ,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=case.tied,
                position_embedding_type="rope",
                mtp_block_spec=mtp,
                vp_stage=stage if case.vpp else None,
            )
        )
    return models


def hybrid_model(case: Case, config: Any) -> Any:
    """A HybridModel on one pipeline stage."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid.stack_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        hybrid_layer_pattern=case.hybrid,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
    )


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """Megatron's local norm refuses sequence parallelism; all it takes is the mark that its gradient is partial."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = True


class PlainAttention(torch.nn.Module):
    """Causal attention over this rank's part of the sequence. Megatron's local one refuses MLA's head sizes and CP."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """`[seq, batch, heads, dim]` each; returns `[seq, batch, heads * value dim]`."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
