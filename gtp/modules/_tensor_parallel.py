"""What the tensor-parallel modules share: settings checked when built, and whole weights cut to this rank's part."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Final, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gtp.errors import GTPValueError
from gtp.ops.collective_backends import BackendName, GemmBackend, gemm_backend, resolve_group
from gtp.protocol import describe_weight, is_distributed_weight

GroupOrMesh = dist.ProcessGroup | DeviceMesh
Init = Callable[[torch.Tensor], object]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def tp_backend(
    module: str,
    tp_group: GroupOrMesh | None,
    tp_gemm_backend: BackendName | GemmBackend,
    *,
    sequence_parallel: bool,
    device: torch.device | str | None,
) -> GemmBackend:
    """The backend of a module that is being built. Collective over the group, unless it is "collective" or of one rank.

    Raises:
        GTPValueError: sequence parallelism is off, or the backend cannot serve this group and device.
    """
    backend = gemm_backend(tp_gemm_backend, tp_group, device=device)
    if backend.size == 1:
        if isinstance(tp_gemm_backend, str) and tp_gemm_backend != "auto":
            # Python shows a warning once for the line that caused it, so a stack of layers says it once
            warnings.warn(
                f"{module}: tp_gemm_backend={tp_gemm_backend!r} has nothing to do at tensor-parallel degree 1; the "
                "plain linear runs",
                stacklevel=2,
                skip_file_prefixes=(_PACKAGE,),
            )
        return backend
    if not sequence_parallel:
        raise GTPValueError(
            f"{module}(sequence_parallel=False): its GEMMs gather and reduce-scatter activations whose sequence is "
            "split over the tensor-parallel ranks; without that there is nothing to fold in. Leave "
            "sequence_parallel=True and hand this module the rank's part of the sequence, or use a stock "
            "tensor-parallel linear"
        )
    return backend


class TPOptions(TypedDict, total=False):
    """What every tensor-parallel module takes by name: the arguments of `TensorParallelModule`."""

    tp_group: GroupOrMesh | None
    tp_gemm_backend: BackendName | GemmBackend
    sequence_parallel: bool
    sequence_dim: int
    init_method: Init | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class TensorParallelModule(nn.Module):
    """What the tensor-parallel modules have in common.

    Args:
        tp_group: The tensor-parallel group or a 1-d mesh. None: one rank.
        tp_gemm_backend: How collectives and GEMMs go together, see `gtp.ops.gemm_backend`. Give all modules of a model
            one backend object where it owns a workspace. At one rank the stock linear runs, and a backend asked for by
            name is mentioned in a warning.
        sequence_parallel: Must be True with more than one rank.
        sequence_dim: Which dim of 3-d activations is the sequence: 1 for `[batch, sequence, features]`, 0 for
            `[sequence, batch, features]`, which moves less data. 2-d activations are `[tokens, features]`.
        init_method: Fills a whole weight `[out features, in features]` in place. Default: that of `nn.Linear`, so the
            same seed gives the same layer as `nn.Linear` at every number of ranks.
        device, dtype: Of the parameters.

    Attributes:
        backend: Moves the activations; knows the group.

    Raises:
        GTPValueError: sequence parallelism is off, or the backend cannot serve this group and device.
    """

    def __init__(
        self,
        *,
        tp_group: GroupOrMesh | None = None,
        tp_gemm_backend: BackendName | GemmBackend = "auto",
        sequence_parallel: bool = True,
        sequence_dim: int = 1,
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.backend = tp_backend(
            type(self).__name__, tp_group, tp_gemm_backend, sequence_parallel=sequence_parallel, device=device
        )
        self.sequence_dim = sequence_dim
        self.init_method: Init = kaiming if init_method is None else init_method
        self._device = device
        self._dtype = dtype

    def part_of(self, what: str, count: int) -> int:
        """This rank's share of `count`, which an error calls `what`."""
        return part_of(type(self).__name__, what, count, self.backend)

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """Uninitialized, where and as the constructor was told."""
        return nn.Parameter(torch.empty(shape, device=self._device, dtype=self._dtype))

    def inner(self, options: TPOptions) -> TPOptions:
        """The options for a module inside this one: the same, and the same backend."""
        return {**options, "tp_gemm_backend": self.backend}

    def dim_of(self, x: torch.Tensor) -> int:
        """Where the sequence of `x` is. A matrix of activations is rows of one sequence."""
        return 0 if x.ndim == 2 else self.sequence_dim


def part_of(module: str, what: str, count: int, backend: GemmBackend) -> int:
    """This rank's share of `count`.

    Raises:
        GTPValueError: it does not split.
    """
    if count < 1 or count % backend.size:
        raise GTPValueError(
            f"{module}: {what}={count} must be a positive multiple of the {backend.size} tensor-parallel ranks. Choose "
            "a multiple, or a smaller group"
        )
    return count // backend.size


def kaiming(weight: torch.Tensor) -> None:
    """The default of `nn.Linear`: uniform within 1 / sqrt(in features)."""
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def draw(
    like: torch.Tensor, shape: tuple[int, ...], init: Init, part: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Draws a whole tensor and gives this rank's part, so one seed gives one model at every tensor-parallel degree.

    Args:
        like: Dtype and device.
        shape: The whole tensor's.
        init: Fills it in place.
        part: Cuts this rank's part out of it.
    """
    full = torch.empty(shape, dtype=like.dtype, device=like.device)
    init(full)
    return part(full)


def draw_bias(
    like: torch.Tensor, features: int, in_features: int, part: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """As `draw`, with the default of `nn.Linear` for a bias `[features]`."""
    bound = 1 / math.sqrt(in_features)
    return draw(like, (features,), lambda full: torch.nn.init.uniform_(full, -bound, bound), part)


def chunk(backend: GemmBackend, dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cuts this rank's equal part along `dim`."""
    return lambda full: full.chunk(backend.size, dim)[backend.rank]


def check_bias(module: str, bias: bool, backend: GemmBackend) -> None:
    """A bias of a column-parallel layer is added inside the GEMM.

    Raises:
        GTPValueError: the backend takes none.
    """
    if bias and not backend.takes_bias:
        raise GTPValueError(
            f"{module}(bias=True): tp_gemm_backend={backend.name!r} takes no bias in the GEMM. Use bias=False, or "
            "'copy_engine' or 'collective'"
        )


def describe(in_features: int, out_features: int, bias: bool, backend: GemmBackend) -> str:
    """`extra_repr` of a parallel linear."""
    return (
        f"in_features={in_features}, out_features={out_features}, bias={bias}, tp={backend.size}, "
        f"tp_gemm_backend={backend.name}"
    )


def sum_gradients_over_tp(parameters: Iterable[nn.Parameter], tp_group: GroupOrMesh | None) -> list[RemovableHandle]:
    """Sums the gradients of parameters that are used on a rank's part of the sequence over the tensor-parallel ranks.

    Norms between the parallel linears see only the tokens of this rank, so what autograd gives them is a part of the
    gradient. The parallel linears' own parameters, biases included, need none of this. One all-reduce per parameter and
    backward, before the gradient is accumulated. `gtp.shard_model` reduces it over its own axes before that.

    Not for weights that `gtp.shard_model` shards, which it refuses: their gradients do not pass through autograd. An
    embedding or a head is best used outside of the split sequence: see `gtp.ops.split_sequence` and
    `gtp.ops.gather_sequence`. Nor for parameters that FSDP2 shards, which replaces them and with them the hooks: name
    them in its `ignored_params`. Copies (`copy.deepcopy`) and what `load_state_dict(assign=True)` puts in place are
    other parameters too: call it for them.

    Args:
        parameters: Parameters that stay replicated, the same ones in the same order on all ranks.
        tp_group: The tensor-parallel group or a 1-d mesh. None or one rank: nothing is done.

    Returns:
        Handles that undo it.
    """
    process_group = None if tp_group is None else resolve_group(tp_group)
    if process_group is None or process_group.size() == 1:
        return []

    def summed(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=process_group)
        return total

    handles = []
    for parameter in parameters:
        if is_distributed_weight(parameter):
            raise GTPValueError(
                f"sum_gradients_over_tp: {describe_weight(parameter)} is sharded, and its gradient does not pass "
                "through autograd. Leave it out, and use it outside of the split sequence (gtp.ops.gather_sequence)"
            )
        if parameter.requires_grad:
            handles.append(parameter.register_hook(summed))
    return handles
