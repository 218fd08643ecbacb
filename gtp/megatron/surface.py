"""All that megatron-core 0.19 touches of a GTP implementation: the names it imports and the attributes of a weight.

One table, so that a Megatron that renames or adds something fails a test that says what (tests/megatron/test_surface.py
takes every row against the installed sources) and not a training run. Paths are relative to `megatron/`.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal


@dataclasses.dataclass(frozen=True)
class ApiName:
    """A name of `megatron.core.tensor_parallel.gtp_api`.

    Attributes:
        name: As imported.
        imported_in: Megatron's files that import it.
        contract: What the caller relies on.
    """

    name: str
    imported_in: tuple[str, ...]
    contract: str


@dataclasses.dataclass(frozen=True)
class BoundAtImport:
    """A module that copies names out of `gtp_api` when it is imported, so the copies are replaced too."""

    module: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A function, or a class with functions, of Megatron that gtp stands before, for sharded weights only.

    Attributes:
        name: Of the function.
        module: Defines it.
        copied_by: Modules that import it by name.
    """

    name: str
    module: str
    copied_by: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class WrappedMethod:
    """A method of Megatron that gtp stands before, for sharded weights only.

    Attributes:
        name: `Class.method`.
        module: Defines the class.
    """

    name: str
    module: str


@dataclasses.dataclass(frozen=True)
class Touched:
    """An attribute or method of a GTP weight.

    Attributes:
        name: Of the attribute.
        how: Megatron reads it, writes it, or calls it.
        files: Where.
        served: `"class"`: every `MegatronGTPWeight` has it. `"megatron"`: Megatron puts it on the weight itself, before
            or after the swap, and it survives. `"absent"`: read with a default, and its absence is the right answer.
        note: Meaning.
    """

    name: str
    how: Literal["read", "written", "called"]
    files: tuple[str, ...]
    served: Literal["class", "megatron", "absent"]
    note: str


_LAYERS = "core/tensor_parallel/layers.py"
_TE = "core/extensions/transformer_engine.py"
_GRAPHS = "core/transformer/cuda_graphs.py"
_UTILS = "core/utils.py"
_T_UTILS = "core/transformer/utils.py"
_MAMBA = "core/ssm/mamba_mixer.py"
_OPTIMIZER = "core/optimizer/optimizer.py"
_DISTRIB = "core/optimizer/distrib_optimizer.py"
_LAYER_WISE = "core/optimizer/layer_wise_optimizer.py"
_EMERGING = "core/optimizer/emerging_optimizers.py"
_CLIP = "core/optimizer/clip_grads.py"
_DDP = "core/distributed/distributed_data_parallel.py"
_BUFFER = "core/distributed/param_and_grad_buffer.py"
_FINALIZE = "core/distributed/finalize_model_grads.py"
_OFFLOAD = "core/pipeline_parallel/fine_grained_activation_offload.py"
_TRAINING = "training/training.py"
_CHECKPOINTING = "training/checkpointing.py"
_INITIALIZE = "training/initialize.py"

API: Final = (
    ApiName(
        "HAVE_GTP",
        (_GRAPHS, _T_UTILS, _UTILS, _MAMBA, _LAYER_WISE, _TRAINING, _CHECKPOINTING, _INITIALIZE),
        "True: the flag may be used",
    ),
    ApiName("gtp_remat_shard_dim0", (_TE,), "(rows per rank, padding rows in all) of a TP-local weight"),
    ApiName("attach_gtp_to_presharded_module", (_TE,), "adopts weights that were built at shard size"),
    ApiName("wrap_module_params_gtp", (_LAYERS,), "slices full weights in place"),
    ApiName("GTPEmbeddingWeight", (_LAYERS,), "apply(weight) is the full TP-local table, differentiable"),
    ApiName("is_gtp_param", (_UTILS, _T_UTILS, _OPTIMIZER, _LAYER_WISE, _MAMBA), "answers for any object"),
    ApiName("dequantize_gtp_native_fp8", (_UTILS,), "plain copy of a shard stored in FP8"),
    ApiName(
        "make_sharded_tensors_for_checkpoint_with_gtp_remat", (_T_UTILS, _OPTIMIZER), "state dict to ShardedTensors"
    ),
    ApiName("wait_for_gtp_grad_reduction_on_current_stream", (_FINALIZE,), "afterwards every main_grad is complete"),
    ApiName("GTPChain", (_GRAPHS,), "enum with GRAPHED and UNGRAPHED"),
    ApiName("get_ag_stream", (_GRAPHS,), "stream of a chain's gathers"),
    ApiName("get_rs_stream", (_GRAPHS,), "stream of a chain's reductions"),
    ApiName("set_cuda_graph_mempool", (_GRAPHS,), "where captured buffers must live"),
    ApiName("wait_async_comms", (_GRAPHS,), "drains gathers and reductions in flight"),
    ApiName("configure_gtp_remat_from_recipe", (_TRAINING,), "once, before the model is built"),
    ApiName("classify_gtp_remat_chains", (_TRAINING,), "once, between DDP and the first forward"),
    ApiName("gtp_native_fp8_load_context", (_CHECKPOINTING,), "context manager around load_state_dict"),
)

BOUND_AT_IMPORT: Final = (
    BoundAtImport(
        "megatron.core.transformer.cuda_graphs",
        ("HAVE_GTP", "GTPChain", "get_ag_stream", "get_rs_stream", "set_cuda_graph_mempool", "wait_async_comms"),
    ),
    BoundAtImport("megatron.core.ssm.mamba_mixer", ("HAVE_GTP", "is_gtp_param")),
    BoundAtImport("megatron.training.training", ("HAVE_GTP",)),
)

WRAPPED: Final = (
    Wrapped(
        "make_tp_sharded_tensor_for_checkpoint",
        "megatron.core.utils",
        (
            "megatron.core.models.common.language_module.language_module",
            "megatron.core.ssm.mamba_mixer",
            "megatron.core.tensor_parallel.layers",
            "megatron.core.transformer.multi_latent_attention",
            "megatron.core.transformer.multi_token_prediction",
            "megatron.core.transformer.utils",
        ),
    ),
    Wrapped(
        "apply_swiglu_sharded_factory", "megatron.core.transformer.mlp", ("megatron.core.transformer.moe.experts",)
    ),
    Wrapped("linear_with_frozen_weight", "megatron.core.tensor_parallel.layers", ()),
    Wrapped("LinearWithGradAccumulationAndAsyncCommunication", "megatron.core.tensor_parallel.layers", ()),
    Wrapped("_create_emerging_optimizer", "megatron.core.optimizer.emerging_optimizers", ("megatron.core.optimizer",)),
    Wrapped("_get_megatron_optimizer_based_on_param_groups", "megatron.core.optimizer", ()),
    Wrapped("_get_megatron_emerging_optimizer", "megatron.core.optimizer", ()),
    Wrapped(
        "build_local_reshard_plan",
        "megatron.core.resharding.planner",
        ("megatron.core.resharding", "megatron.core.resharding.refit"),
    ),
)

WRAPPED_METHODS: Final = (
    WrappedMethod("TensorParallelMuon.orthogonalize", "megatron.core.optimizer.emerging_optimizers"),
    WrappedMethod("Float16OptimizerWithFloat16Params.__init__", "megatron.core.optimizer.optimizer"),
    WrappedMethod("FullyShardedDataParallel.__init__", "megatron.core.distributed.fsdp.mcore_fsdp_adapter"),
    WrappedMethod(
        "TorchFullyShardedDataParallel.__init__", "megatron.core.distributed.torch_fully_sharded_data_parallel"
    ),
    WrappedMethod("DistributedDataParallel.broadcast_params", "megatron.core.distributed.distributed_data_parallel"),
    WrappedMethod("DistributedOptimizer.save_parameter_state", "megatron.core.optimizer.distrib_optimizer"),
    WrappedMethod("ChainedOptimizer.save_parameter_state", "megatron.core.optimizer.optimizer"),
    WrappedMethod("MambaMixer.sharded_state_dict", "megatron.core.ssm.mamba_mixer"),
    WrappedMethod("_GDNBase.sharded_state_dict", "megatron.core.ssm.gated_delta_net.common"),
)

WEIGHT: Final = (
    Touched("all_gather_and_prefetch", "called", (_LAYERS,), "class", "full weight for the forward GEMM"),
    Touched("all_gather_and_prefetch_bwd", "called", (_LAYERS,), "class", "full weight for the dgrad GEMM"),
    Touched("wgrad_reduce_scatter", "called", (_LAYERS,), "class", "full wgrad in, autograd's gradient out"),
    Touched("register_grad_accum_hook", "called", (_DDP,), "class", "how DDP learns that main_grad is complete"),
    Touched("get_data_tensors", "called", (_OFFLOAD,), "class", "for offloading"),
    Touched(
        "is_gtp_weight_remat", "read", (_LAYERS, _DDP, _FINALIZE, _GRAPHS, _EMERGING), "class",
        "each peer holds other rows: count it, do not all-reduce it",
    ),
    Touched("group", "read", (_UTILS, _MAMBA), "class", "the GTP process group"),
    Touched("gtp_remat_size", "read", (_MAMBA, _TE), "class", "size of that group"),
    Touched("pad_length", "read", (_UTILS,), "class", "padding rows of the whole weight"),
    Touched("_need_weight_prefetch", "written", (_LAYERS,), "megatron", "a hint about order; gtp learns the order"),
    Touched("next_w", "read", (_GRAPHS,), "class", "None: no neighbour finishes this weight's gradient"),
    Touched("prev_w", "read", (_GRAPHS,), "class", "None, as next_w"),
    Touched("_weights", "read", (_GRAPHS,), "class", "members of the weight group"),
    Touched("is_routed_expert", "read", (_GRAPHS,), "class", "weights of a grouped module"),
    Touched("weight_list", "read", (_GRAPHS,), "class", "on the leader of a grouped module, its members"),
    Touched("_grad_accum_hook", "read", (_GRAPHS,), "class", "the hook that DDP registered"),
    Touched("_debug_name", "read", (_OPTIMIZER,), "class", "a string, for messages"),
    Touched("_gtp_dequant_src", "read", (_UTILS, _OPTIMIZER), "absent", "on copies of weights stored in FP8"),
    Touched("main_grad", "written", (_BUFFER, _DDP, _GRAPHS), "megatron", "view into DDP's gradient buffer"),
    Touched("grad_added_to_main_grad", "written", (_DDP, _GRAPHS), "megatron", "True once main_grad has the gradient"),
    Touched("zero_out_wgrad", "read", (_DDP,), "megatron", "on shared embeddings; only about what is in .grad"),
    Touched("_cudagraph_wgrad_ready_event", "written", (_GRAPHS, _DDP), "absent", "of captured backwards"),
    Touched("allreduce", "written", (_LAYERS, _TE, _FINALIZE, _GRAPHS, _OPTIMIZER), "megatron", "False: expert groups"),
    Touched("tensor_model_parallel", "written", (_LAYERS, _TE), "megatron", "split by tensor parallelism"),
    Touched("partition_dim", "written", (_LAYERS, _TE), "megatron", "which dim that is"),
    Touched("partition_stride", "written", (_LAYERS, _TE), "megatron", "and its stride"),
    Touched("expert_tp", "read", (_LAYERS, _EMERGING), "megatron", "weights of experts, for Muon"),
    Touched("is_qkv", "read", (_LAYERS, _EMERGING), "megatron", "fused QKV, for Muon"),
    Touched("qkv_split_shapes", "read", (_LAYERS,), "megatron", "sizes of its parts"),
    Touched("skip_backward_post_hook", "read", (_DDP,), "absent", "of delayed wgrads in Transformer Engine modules"),
    Touched("data", "written", (_BUFFER,), "class", "re-pointed into DDP's parameter buffer"),
)  # fmt: skip
"""Beside these, what every `torch.nn.Parameter` has."""
