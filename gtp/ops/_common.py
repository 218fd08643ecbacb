"""What the ops share: which weights they manage themselves, how a wgrad is written, and what backward must refuse.

A weight is *managed* if the op, and not autograd, decides what becomes of its gradient: a distributed weight, or a
plain one whose owner collects gradients in `main_grad`. Everything else takes torch's own path.

[Note: weights stay out of save_for_backward] Managed weights are kept as the same Python object on the autograd
context.
Saved-tensor hooks (non-reentrant checkpointing, activation offloading) replace what is saved by a detached tensor,
which would no longer be a `DistributedWeight`. The shard is a parameter, alive anyway; what saving also gave, the error
when it is changed between forward and backward, is done by `gtp.ops.versions`.

[Note: outputs are no views]
Autograd lets nobody write in place (`relu_`, `+=`) to a view that a Function's forward made, and some products are
views: torch's own linear makes a matrix of a batch, adds the bias, and gives a view as a batch. `.data` is the same
memory and no view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gtp.errors import GTPValueError, ProtocolError, UnsupportedError
from gtp.protocol import (
    describe_weight,
    finalize_weight_grads,
    is_distributed_weight,
    weight_grad_buffers,
)

# Metadata of a shard is read past its __torch_function__: it costs less, and it is the plain tensor's in any case.
plain_access = torch._C.DisableTorchFunctionSubclass


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`function.apply`, past what torch's own does in Python for transforms of `torch.func`, which takes as long as a
    small product.

    Raises:
        UnsupportedError: called inside such a transform.
    """
    direct: Callable[..., torch.Tensor] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> torch.Tensor:
        if torch._C._are_functorch_transforms_active():
            raise refused_transform(
                "a distributed weight, or one that collects main_grad, was used inside a transform of torch.func "
                "(grad, vmap, ...)"
            )
        return direct(*args)

    return apply


def refused_transform(what: str) -> UnsupportedError:
    """The error for transforms of torch.func, with what to use."""
    return UnsupportedError(
        f"{what}, which does not carry gathers and reductions. Use torch.autograd (loss.backward(), "
        "torch.autograd.grad), and a batch dimension in place of vmap; or transform the plain model"
    )


def collects_main_grad(weight: torch.Tensor) -> bool:
    """Whether a plain weight's owner wants its gradient added to `main_grad` (Megatron's and TE's convention)."""
    return getattr(weight, "main_grad", None) is not None and hasattr(weight, "grad_added_to_main_grad")


def is_managed(weight: torch.Tensor) -> bool:
    """Whether the op handles the weight's gradient itself."""
    return is_distributed_weight(weight) or collects_main_grad(weight)


def is_surely_plain(weight: torch.Tensor) -> bool:
    """Whether the weight is not managed, and is of a class for which torch.compile can tell.

    While tracing, torch takes an attribute of a tensor subclass that has a `__getattr__` of its own for missing, and a
    shard would pass for a full weight. So other classes are asked outside the graph (`gtp.ops.compilers`).
    """
    kind = type(weight)
    return (kind is torch.nn.Parameter or kind is torch.Tensor) and not is_managed(weight)


def refuse_distributed(op: str, **tensors: torch.Tensor | None) -> None:
    """Arguments other than the weight must be plain.

    Raises:
        UnsupportedError: one of them is a distributed weight.
    """
    for argument, tensor in tensors.items():
        if tensor is not None and is_distributed_weight(tensor):
            raise UnsupportedError(
                f"{describe_weight(tensor)} was given to {op} as {argument}; a distributed weight can be used as the "
                "weight alone. Use a replicated parameter here"
            )


def refused_input(weight: torch.Tensor, x: torch.Tensor) -> UnsupportedError:
    """The error for a nested or sparse input where gradients are wanted: there are no products for it in backward.

    Raised before a gather. Asked in place, because each op pays for a function that only asks.
    """
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return UnsupportedError(
        f"{describe_weight(weight)}: the input is a {kind} tensor, and gradients are computed with dense ones. Give it "
        ".values() of a nested tensor, or .to_dense() of a sparse one; under torch.no_grad() it may stay what it is"
    )


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast wants matrix products of `x` in, `None` where autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_to(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """`tensor` as autocast would hand it to a matrix product: float64 and integers are left alone."""
    if dtype is None or tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def refuse_double_backward(weights: Sequence[torch.Tensor]) -> None:
    """To be called first in backward of a gathered weight.

    Not `once_differentiable`: it lets a gradient through as a constant where the incoming one is constant (that of a
    sum), and what a penalty on it should give the weight would be missing without a word.

    Raises:
        UnsupportedError: backward runs with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise refused_double_backward(
            weights[0],
            "the full weight does not stay gathered for it",
            "leave the weights on its way unsharded with gtp.shard_model(exclude=...)",
        )


def refused_double_backward(weight: torch.Tensor, because: str, instead: str) -> UnsupportedError:
    """The error for create_graph=True, with what to use."""
    return UnsupportedError(
        f"{describe_weight(weight)}: double backward (create_graph=True) is not supported, because {because}. Call "
        f"backward without create_graph=True; where a second derivative is needed (a gradient penalty), {instead}"
    )


def refuse_sparse(weight: torch.Tensor, grad: torch.Tensor) -> None:
    """
    Raises:
        UnsupportedError: the gradient that autograd has for a weight is not dense.
    """
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"{describe_weight(weight)}: its gradient is sparse ({grad.layout}), and gradients of a sharded model are "
            "reduced dense. Use the function that makes it with sparse=False"
        )


def is_wanted(ctx: Any, position: int) -> bool:
    """Whether this backward computes the gradient of a leaf, the `position`-th tensor that the op was given.

    `ctx.needs_input_grad` knows what requires grad, and not that `torch.autograd.grad` asks for some of it only. A
    gradient nobody asked for must not be handed over: implementers accumulate it.

    One or a few us; a leaf that `autograd.grad` asks for costs the tens of us of a C++ exception. One answer cannot
    stand for a whole backward, because `autograd.grad` asks for some leaves and not for others.
    """
    node = ctx.next_functions[position][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # torch's answer where autograd.grad asks for this very leaf


def check_rows(weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], rows: int, call: str) -> None:
    """
    Raises:
        ProtocolError: a tensor that an implementer handed out does not have the rows of the forward's full weight.
    """
    for weight, tensor in zip(weights, tensors, strict=True):
        if tensor.shape[0] != rows:
            raise ProtocolError(
                f"{call} of {describe_weight(weight)} promised a tensor of {rows} rows, as the full weight of forward "
                f"had, got {tuple(tensor.shape)}"
            )


def check_dtype(weight: torch.Tensor, full: torch.Tensor, x: torch.Tensor) -> None:
    """
    Raises:
        GTPValueError: the input and the full weight differ in dtype, which torch's products do not take.
    """
    if full.dtype is not x.dtype:
        raise GTPValueError(
            f"{describe_weight(weight)}: its full weight is {full.dtype} and the input is {x.dtype}. Convert the "
            "input, run under torch.autocast, or choose the weight's compute dtype with GTPConfig(param_dtype=...)"
        )


def wgrad_buffers(weights: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor | None]:
    """Where each wgrad GEMM writes `[rows, *trailing]`, contents undefined; `None` where the op allocates."""
    buffers = weight_grad_buffers(weights)
    if buffers is None:
        return [None] * len(weights)
    check_rows(weights, buffers, rows, "grad_buffer")
    return [*buffers]


def write_wgrad(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None, wide: torch.dtype | None) -> torch.Tensor:
    """`dy.t() @ x`, the same bits as autograd's own for `F.linear`.

    Args:
        dy: `[tokens, rows]`.
        x: `[tokens, in]`, same dtype.
        out: `[rows, in]` to write into, or None to allocate.
        wide: The dtype that the result is wanted in. Where the device's GEMM can write it (CUDA, float32), nothing is
            rounded to the operands' dtype in between; else the result is converted after it. None: the operands' dtype.
    """
    if dy.shape[0] == 0:
        return x.new_zeros(dy.shape[1], x.shape[1]) if out is None else out.zero_()
    dtype = x.dtype if wide is None else wide
    if dtype is not x.dtype and x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        if out is None:
            return torch.mm(dy.t(), x, out_dtype=dtype)
        if out.dtype is dtype:
            return torch.mm(dy.t(), x, out_dtype=dtype, out=out)
    if out is None:
        return torch.mm(dy.t(), x)
    if out.dtype is x.dtype:
        return torch.mm(dy.t(), x, out=out)
    return out.copy_(torch.mm(dy.t(), x))


def finish_wgrads(weights: Sequence[torch.Tensor], wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Hands fresh full wgrads to whoever owns the gradient; returns what autograd is given, one entry per weight."""
    if is_distributed_weight(weights[0]):
        return finalize_weight_grads(weights, wgrads)
    return [_add_to_main_grad(w, g) if collects_main_grad(w) else g for w, g in zip(weights, wgrads, strict=True)]


def main_grad_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """Dtype of a plain weight's `main_grad`, `None` if it does not collect one."""
    return weight.main_grad.dtype if collects_main_grad(weight) else None  # type: ignore[attr-defined]


def _add_to_main_grad(weight: torch.Tensor, wgrad: torch.Tensor) -> torch.Tensor:
    # One GEMM, one addition, in the order in which `.grad` accumulates: both ways give the same bits in one dtype.
    weight.main_grad.add_(wgrad.view_as(weight.main_grad))  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[*, n]` as `[prod(*), n]`; a view where strides allow."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
