"""What the collective GEMMs share: operands checked and cast, full weights as matrices, and where a wgrad goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gtp.errors import GTPValueError
from gtp.ops._common import (
    autocast_to,
    check_dtype,
    check_rows,
    finish_wgrads,
    is_managed,
    main_grad_dtype,
    plain_access,
    refuse_distributed,
    refused_transform,
    write_wgrad,
)
from gtp.ops.collective_backends import GemmBackend
from gtp.ops.versions import ShardVersions
from gtp.protocol import (
    describe_weight,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    weight_grad_buffers,
)


def check_operands(
    who: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backend: GemmBackend,
    *,
    bias_in_gemm: bool,
) -> None:
    """What can be found out before any collective.

    Raises:
        GTPValueError: shapes that do not go together, a bias that the backend does not take, or no backend.
        UnsupportedError: a distributed weight given as x or bias; a transform of torch.func.
    """
    if not isinstance(backend, GemmBackend):
        raise GTPValueError(
            f"{who}: backend must be a GemmBackend, got {backend!r}. Make one for the tensor-parallel group with "
            "gtp.ops.gemm_backend(name, group)"
        )
    if torch._C._are_functorch_transforms_active():
        raise refused_transform(f"{who} was called inside a transform of torch.func (grad, vmap, ...)")
    if is_distributed_weight(x) or (bias is not None and is_distributed_weight(bias)):
        refuse_distributed(who, x=x, bias=bias)
    if x.ndim == 0:
        raise GTPValueError(f"{who}: x must have at least a sequence and a feature dim, got a scalar")
    with plain_access():
        shape = weight.shape
    if len(shape) < 2 or shape[-1] != x.shape[-1]:
        raise GTPValueError(
            f"{who}: {describe_weight(weight)} must be [..., {x.shape[-1]}] to meet x {tuple(x.shape)}; the last dims "
            "are the in features"
        )
    if bias is None:
        return
    if bias_in_gemm and not backend.takes_bias:
        raise GTPValueError(
            f"{who}: tp_gemm_backend={backend.name!r} takes no bias in the GEMM. Use bias=False, or 'copy_engine' or "
            "'collective'"
        )
    rows = None if is_distributed_weight(weight) else shape[:-1].numel()
    if bias.ndim != 1 or rows not in (None, bias.shape[0]):
        raise GTPValueError(f"{who}: the bias must be [{rows or 'out features'}], got {tuple(bias.shape)}")


def check_dtypes(
    who: str, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> None:
    """As far as it can be known before a gather: the dtype that a distributed weight comes in is its own affair.

    Raises:
        GTPValueError: a plain weight or a bias has another dtype than x, or is on another device. (torch's products of
            a CPU tensor with one on the meta device are garbage.)
    """
    device, dtype = x.device, x.dtype
    with plain_access():
        for weight in weights:
            if weight.dtype is not dtype and not is_managed(weight):
                check_dtype(weight, weight, x)
            if weight.device != device:
                raise _elsewhere(who, "weight", weight, x)
        for bias in biases:
            if bias is None:
                continue
            if bias.device != device:
                raise _elsewhere(who, "bias", bias, x)
            if bias.dtype is not dtype:
                raise GTPValueError(
                    f"{who}: the bias is {bias.dtype} and x is {dtype}. Convert the bias, or run under torch.autocast"
                )


def _elsewhere(who: str, what: str, tensor: torch.Tensor, x: torch.Tensor) -> GTPValueError:
    return GTPValueError(f"{who}: the {what} is on {tensor.device} and x on {x.device}. Move one to the other")


def autocast_operands(
    dtype: torch.dtype | None,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """Operands as autocast would hand them to a GEMM. A managed weight is cast when it is whole."""
    if dtype is None:
        return x, list(weights), list(biases)
    cast = [w if is_managed(w) else autocast_to(w, dtype) for w in weights]
    return autocast_to(x, dtype), cast, [b if b is None else autocast_to(b, dtype) for b in biases]


def forward_matrix(weight: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The full weight `[N, K]` for the forward GEMM.

    Args:
        x: What it will meet, for its dtype.
        dtype: Autocast's, or None.

    Raises:
        GTPValueError: weight and x differ in dtype.
    """
    (full,) = materialize_weight_for_forward([weight])
    matrix = full.flatten(0, -2) if full.ndim > 2 else full
    if dtype is not None:
        matrix = autocast_to(matrix, dtype)
    if matrix.dtype is not x.dtype:
        check_dtype(weight, matrix, x)
    return matrix


def backward_matrix(weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The full weight `[N, K]` for the dgrad GEMM, in the dtype of `dy [M, N]`."""
    (full,) = materialize_weight_for_backward([weight])
    matrix = full.flatten(0, -2) if full.ndim > 2 else full
    if matrix.shape[0] != dy.shape[1]:
        check_rows([weight], [matrix], dy.shape[1], "materialize_group_for_backward")
    return matrix if matrix.dtype is dy.dtype else autocast_to(matrix, dy.dtype)


class KeptWeights:
    """The weights of one forward, kept for its backward.

    Plain ones belong in `save_for_backward`. Managed ones must not go there: see [Note: weights stay out of
    save_for_backward].
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._kept = [w if is_managed(w) else None for w in weights]
        self.for_saving = [w if kept is None else None for w, kept in zip(weights, self._kept, strict=True)]
        self._managed = [w for w in self._kept if w is not None]
        self._versions = ShardVersions(self._managed) if self._managed else None

    def back(self, saved: Sequence[Any]) -> list[torch.Tensor]:
        """The weights, given what came back for `for_saving`."""
        return [plain if kept is None else kept for kept, plain in zip(self._kept, saved, strict=True)]

    def check_unchanged(self) -> None:
        """
        Raises:
            GTPStateError: a managed weight was written since forward, and dgrad would use the new values.
        """
        if self._versions is not None:
            self._versions.check(self._managed)


class WgradTarget:
    """Where the wgrad of one weight is written: its own buffer if it is distributed, else fresh memory.

    Args:
        rows: N of the full weight.
        operand: One of the GEMM's operands, for dtype and device.
        rounded: Keep the result in the operands' dtype even where a wider one is wanted, as autocast does.

    Attributes:
        matrix: `[N, K]`, contiguous, in the operands' dtype or in a wider one.
    """

    def __init__(self, weight: torch.Tensor, rows: int, operand: torch.Tensor, *, rounded: bool) -> None:
        self._weight = weight
        with plain_access():
            shape = weight.shape
        buffers = weight_grad_buffers([weight])
        if buffers is None:
            dtype = main_grad_dtype(weight) or operand.dtype
            self._buffer = operand.new_empty(shape, dtype=dtype)
        else:
            self._buffer = buffers[0]
            check_rows([weight], [self._buffer], rows // shape[1:-1].numel(), "grad_buffer")
        self.matrix = self._buffer if len(shape) == 2 else self._buffer.view(rows, shape[-1])
        if rounded and self.matrix.dtype != operand.dtype:
            self.matrix = torch.empty_like(self.matrix, dtype=operand.dtype)

    def finish(self) -> Any:
        """Hands the written wgrad over; returns what autograd is given."""
        if self.matrix.dtype != self._buffer.dtype:
            self._buffer.copy_(self.matrix.view(self._buffer.shape))
        return finish_wgrads([self._weight], [self._buffer])[0]


def written_wgrad(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, *, rounded: bool) -> Any:
    """`dy.t() @ x`, handed over; what autograd is given. As with a `WgradTarget`, in memory of the GEMM's own making
    where the weight is plain.

    Args:
        weight: `[N, K]`, with any dims in place of N.
        dy: `[M, N]`.
        x: `[M, K]`.
        rounded: See `WgradTarget`.
    """
    if is_distributed_weight(weight):
        target = WgradTarget(weight, dy.shape[1], x, rounded=rounded)
        write_wgrad(dy, x, target.matrix, target.matrix.dtype)
        return target.finish()
    dtype = main_grad_dtype(weight) or x.dtype
    wgrad = write_wgrad(dy, x, None, None if rounded else dtype)
    if wgrad.dtype is not dtype:
        wgrad = wgrad.to(dtype)
    return finish_wgrads([weight], [wgrad if weight.ndim == 2 else wgrad.view(weight.shape)])[0]
