"""Muon for sharded matrices: momentum, orthogonalized as a whole matrix, of which each rank keeps its rows.

The method: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/. Decoupled weight decay and the scale "match_rms_adamw": Moonshot AI,
"Muon is Scalable for LLM Training", arXiv:2502.16982. Names and defaults are those of `torch.optim.Muon`, which on a
plain model does the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gtp.errors import GTPValueError
from gtp.optim.clip import local_grad
from gtp.weights.agreement import agree
from gtp.weights.layout import ShardLayout
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard_tensor import LocalShard

_SCALES = (None, "original", "match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """Muon over matrices, sharded (`GTPWeight`) or not. `step` is collective over each weight's GTP group.

    Per matrix `W [rows, cols]`, gradient `G`, momentum `M`, with all sizes logical, so padding has no influence:

        M = momentum * M + (1 - momentum) * G
        U = (1 - momentum) * G + momentum * M if nesterov else M
        W = W * (1 - lr * weight_decay) - lr * scale(rows, cols) * orthogonalize(U)

    The ranks of a group divide the matrices: in rounds of as many matrices as ranks, each rank collects the rows of
    one, orthogonalizes it and sends the rows back. Per rank and round this moves one matrix out and one in, in
    `compute_dtype`, and holds one full matrix and the temporaries of its orthogonalization.

    Args:
        params: Matrices of hidden layers, or parameter groups of them. Embeddings, heads, biases and norms are for
            another optimizer, such as `torch.optim.AdamW`.
        lr: Learning rate, >= 0.
        weight_decay: Decoupled weight decay, >= 0.
        momentum: 0 <= momentum < 1.
        nesterov: Whether to look ahead by the momentum.
        ns_coefficients: The three coefficients of the Newton-Schulz polynomial.
        eps: Lower bound of the norm that the matrix is divided by.
        ns_steps: Iterations, 1 to 99.
        adjust_lr_fn: `scale`: "original" (None) is `sqrt(max(1, rows / cols))`, "match_rms_adamw" is
            `0.2 * sqrt(max(rows, cols))`.
        compute_dtype: Dtype of the orthogonalization and of the exchange between ranks.

    Raises:
        GTPValueError: a parameter is not a real matrix, or a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "compute_dtype": compute_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as `torch.optim.Optimizer` does.

        Raises:
            GTPValueError: a parameter is not a real matrix, or a setting is out of range.
        """
        super().add_param_group(param_group)
        try:
            _require_settings(self.param_groups[-1])
            for position, parameter in enumerate(self.param_groups[-1]["params"]):
                _require_matrix(parameter, position)
        except GTPValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("compute_dtype", torch.bfloat16)  # absent in what torch.optim.Muon saved

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for all parameters that have a gradient. All ranks of a group must have the same of them.

        Args:
            closure: Recomputes the loss, with gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pending = [_Pending(p, u) for p in group["params"] if (u := self._momentum(p, group)) is not None]
            for parameter, update in _orthogonalized(pending, group):
                rows, cols = _layout_or_shape(parameter)
                lr = float(group["lr"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * _scale(group["adjust_lr_fn"], rows, cols))
        return loss

    def _momentum(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor | None:
        """What is to be orthogonalized, of the parameter's local shape."""
        grad = local_grad(parameter)
        if grad is None:
            return None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            zeros = torch.zeros_like(grad)
            state["momentum_buffer"] = parameter.local_state(zeros) if isinstance(parameter, GTPWeight) else zeros
        kept = state["momentum_buffer"]
        buffer = kept.shard if isinstance(kept, LocalShard) else kept
        if buffer.shape != grad.shape:
            raise GTPValueError(
                f"{_label(parameter)}: Muon's momentum_buffer has shape {tuple(buffer.shape)}, and this rank's "
                f"gradient {tuple(grad.shape)}. State of whole matrices is cut to rows by gtp.checkpoint.load and "
                "gtp.checkpoint.load_optimizer_state_dict, not by load_state_dict"
            )
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(group["compute_dtype"])


def orthogonalize(
    matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Brings all singular values of a matrix near one, by a Newton-Schulz iteration.

    With `X` the matrix over its Frobenius norm, the shorter side first, each step is
    `X = a X + (b A + c A A) X` with `A = X X^T`. The coefficients are chosen for a steep start,
    not for convergence: singular values end around one, not at it.

    Args:
        matrix: `[rows, cols]`, whole, without padding.
        coefficients: a, b, c.
        steps: Iterations.
        eps: Lower bound of the norm.
        dtype: Of the iteration and the result.

    Returns:
        `[rows, cols]`, fresh.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


class _Pending(NamedTuple):
    """A parameter and what is to be orthogonalized, local."""

    parameter: torch.Tensor
    update: torch.Tensor


def _orthogonalized(pending: list[_Pending], settings: Mapping[str, Any]) -> list[_Pending]:
    """The same parameters with their orthogonalized updates."""
    done: list[_Pending] = []
    shared: dict[dist.ProcessGroup, list[_Pending]] = {}
    for entry in pending:
        if isinstance(entry.parameter, GTPWeight) and entry.parameter.layout.group_size > 1:
            shared.setdefault(entry.parameter.group, []).append(entry)
        else:
            done.append(_alone(entry, settings))
    weights = [e.parameter for entries in shared.values() for e in entries if isinstance(e.parameter, GTPWeight)]
    agree(weights, "orthogonalize the updates of")
    for group, entries in shared.items():
        # matrices of a round are worked on at once: put those of like size together
        entries.sort(key=lambda e: -_layout(e).logical_numel)
        for start in range(0, len(entries), group.size()):
            done += _round(entries[start : start + group.size()], group, settings)
    return done


def _alone(entry: _Pending, settings: Mapping[str, Any]) -> _Pending:
    rows, _ = _layout_or_shape(entry.parameter)
    update = _run(entry.update[:rows], settings)
    if update.shape[0] != entry.update.shape[0]:
        padded = torch.zeros_like(entry.update)
        padded[:rows].copy_(update)
        update = padded
    return _Pending(entry.parameter, update)


def _round(entries: list[_Pending], group: dist.ProcessGroup, settings: Mapping[str, Any]) -> list[_Pending]:
    """Up to one matrix per rank: rank i of the group collects matrix i, orthogonalizes it, and sends the rows back."""
    rank, size = group.rank(), group.size()
    rows = torch.cat([entry.update.reshape(-1) for entry in entries])
    row_sizes = [entry.update.numel() for entry in entries] + [0] * (size - len(entries))
    mine = _layout(entries[rank]) if rank < len(entries) else None
    matrix_sizes = [mine.shard_numel if mine is not None else 0] * size
    matrix = rows.new_empty(sum(matrix_sizes))
    dist.all_to_all_single(matrix, rows, matrix_sizes, row_sizes, group=group)
    if mine is not None:
        full = matrix.view(mine.padded_shape)[: mine.rows]
        full.copy_(_run(full, settings))  # padding came as zeros, and stays
    dist.all_to_all_single(rows, matrix, row_sizes, matrix_sizes, group=group)
    pieces = rows.split(row_sizes[: len(entries)])
    return [_Pending(e.parameter, piece.view(e.update.shape)) for e, piece in zip(entries, pieces, strict=True)]


def _run(matrix: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    return orthogonalize(
        matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"], settings["compute_dtype"]
    )


def _scale(name: str | None, rows: int, cols: int) -> float:
    return 0.2 * math.sqrt(max(rows, cols)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / cols))


def _label(parameter: torch.Tensor) -> str:
    return parameter.name if isinstance(parameter, GTPWeight) else f"a parameter of shape {tuple(parameter.shape)}"


def _layout(entry: _Pending) -> ShardLayout:
    assert isinstance(entry.parameter, GTPWeight)
    return entry.parameter.layout


def _layout_or_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Logical rows and columns."""
    rows, cols = parameter.logical_shape if isinstance(parameter, GTPWeight) else parameter.shape
    return rows, cols


def _require_settings(group: Mapping[str, Any]) -> None:
    allowed = {
        "lr": (float(group["lr"]) >= 0, "at least 0"),
        "weight_decay": (group["weight_decay"] >= 0, "at least 0"),
        "momentum": (0 <= group["momentum"] < 1, "at least 0 and below 1"),
        "eps": (group["eps"] > 0, "above 0"),
        "ns_steps": (1 <= group["ns_steps"] < 100, "between 1 and 99"),
        "ns_coefficients": (len(group["ns_coefficients"]) == 3, "three numbers"),
        "adjust_lr_fn": (group["adjust_lr_fn"] in _SCALES, f"one of {_SCALES}"),
        "compute_dtype": (group["compute_dtype"].is_floating_point, "a floating dtype"),
    }
    for name, (holds, what) in allowed.items():
        if not holds:
            raise GTPValueError(f"Muon: {name} must be {what}, got {group[name]!r}")


def _require_matrix(parameter: torch.Tensor, position: int) -> None:
    name, shape = f"parameter {position} of the group", tuple(parameter.shape)
    if isinstance(parameter, GTPWeight):
        name, shape = parameter.name, parameter.layout.logical_shape
    if len(shape) != 2 or 0 in shape or not parameter.is_floating_point():
        raise GTPValueError(
            f"{name}: Muon orthogonalizes matrices, and this has shape {shape} and dtype {parameter.dtype}. Give "
            "biases, norms and other parameters that are no matrix to torch.optim.AdamW, in an optimizer of their "
            "own"
        )
