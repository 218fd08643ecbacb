"""Collective GEMMs behind Megatron-Core's own tensor-parallel linears: `install(tp_gemm_backend=...)`.

Megatron's local `ColumnParallelLinear` gathers the sequence and then multiplies; its `RowParallelLinear` multiplies and
then reduce-scatters. Where sequence parallelism is on, the methods that do so are replaced by the collective GEMMs of
`gtp.ops`. Modules, parameters, checkpoints and Transformer Engine's layers stay what they are. Weights may be plain or
sharded by the flag; then the gather of the weight and that of the activation are under way together.

Left alone: one tensor-parallel rank, and the linears of experts, which get tokens that a dispatcher has exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn

from gtp.errors import GTPValueError, UnsupportedError
from gtp.megatron.building import root_under_construction
from gtp.ops import GemmBackend, all_gather_linear, gemm_backend, linear_reduce_scatter
from gtp.ops.collective_backends import BackendName

MODULE: Final = "megatron.core.tensor_parallel.layers"

_BACKEND: Final = "gtp_tp_gemm_backend"  # of a linear that collective GEMMs serve
_BACKENDS: Final = "gtp_tp_gemm_backends"  # of a model: one per group, since they own a workspace

_log = logging.getLogger("gtp")

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def method_wrappers(name: BackendName) -> Mapping[str, Wrapper]:
    """Per method of Megatron (`Class.method` of `MODULE`), what makes its replacement from it."""
    return MappingProxyType(
        {
            "ColumnParallelLinear.__init__": lambda real: _built(real, name),
            "ColumnParallelLinear._forward_impl": _column,
            "RowParallelLinear.__init__": lambda real: _built(real, name),
            "RowParallelLinear.forward": _row,
        }
    )


def _built(real: Callable[..., None], name: BackendName) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.explicit_expert_comm:
            return
        root = root_under_construction(self)
        if self.tp_group.size() == 1:
            _say_once(root, name)
            return
        backend = _backend_of(root, name, self.tp_group, _device_of(self))
        _check(self, backend)
        self.__dict__[_BACKEND] = backend

    return __init__


def _column(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        backend: GemmBackend | None = self.__dict__.get(_BACKEND)
        if backend is None:
            return real(self, input, weight, *args, **kwargs)
        return all_gather_linear(input, weight, kwargs["bias"], backend=backend)

    return _forward_impl


def _row(real: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        backend: GemmBackend | None = self.__dict__.get(_BACKEND)
        if backend is None:
            return cast("tuple[torch.Tensor, torch.Tensor | None]", real(self, input_))
        # The bias is outside: Megatron sums the gradients of its `sequence_parallel` parameters over the ranks itself.
        output = linear_reduce_scatter(input_, self.weight, backend=backend)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None

    return forward


def _backend_of(root: nn.Module, name: BackendName, group: dist.ProcessGroup, device: torch.device) -> GemmBackend:
    """The model's backend over a group, made at the first call. It lives as long as the model."""
    backends: dict[dist.ProcessGroup, GemmBackend] = root.__dict__.setdefault(_BACKENDS, {})
    if group not in backends:
        backends[group] = gemm_backend(name, group, device=device)
        _log.info("gtp: Megatron's parallel linears run %s over %s", backends[group].name, group.group_name)
    return backends[group]


def _say_once(root: nn.Module, name: BackendName) -> None:
    if _BACKENDS not in root.__dict__:
        root.__dict__[_BACKENDS] = {}
        _log.warning(
            "gtp: tp_gemm_backend=%r has nothing to do at tensor-parallel degree 1; Megatron's linears run", name
        )


def _device_of(module: Any) -> torch.device:
    """Where the module will run: Megatron may initialize weights on the CPU and move them."""
    if "nccl" in dist.get_backend(module.tp_group):
        return torch.device("cuda", torch.cuda.current_device())
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _check(module: Any, backend: GemmBackend) -> None:
    """
    Raises:
        GTPValueError: a setting of the model without which there is nothing to fold in, or features that do not split.
        UnsupportedError: a feature of Megatron that works inside of what is replaced.
    """
    who, config = type(module).__name__, module.config
    asked = f"gtp.megatron.install(tp_gemm_backend={backend.name!r})"
    if not module.sequence_parallel:
        raise GTPValueError(
            f"{asked}: {who} has sequence_parallel=False, and then no gather or reduce-scatter that a GEMM could hide. "
            "Set TransformerConfig(sequence_parallel=True), or install without tp_gemm_backend"
        )
    if getattr(module, "disable_grad_reduce", False):
        raise UnsupportedError(
            f"{asked}: {who}(disable_grad_reduce=True) is not served. Install without tp_gemm_backend"
        )
    for name in ("defer_embedding_wgrad_compute", "cpu_offloading", "mtp_detach_heads"):
        if getattr(config, name):
            raise UnsupportedError(
                f"{asked}: TransformerConfig({name}=True) works inside Megatron's own linears, which this replaces. "
                "Turn it off, or install without tp_gemm_backend"
            )
    column = hasattr(module, "output_size_per_partition")
    if column and module.bias is not None and not module.skip_bias_add and not backend.takes_bias:
        raise GTPValueError(
            f"{asked}: {who} adds a bias inside its GEMM, and this backend takes none. Use add_bias_linear=False, or "
            "'copy_engine' or 'collective'"
        )
    if column and module.input_size % backend.size:
        raise GTPValueError(
            f"{asked}: {who} has {module.input_size} in features, which do not split over {backend.size} "
            "tensor-parallel ranks, as backward needs"
        )
