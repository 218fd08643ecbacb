"""Constructor arguments that Transformer Engine's namesakes take and these modules do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from gtp.errors import UnsupportedError


class _Refusal(NamedTuple):
    argument: str
    default: object  # Transformer Engine's: passing it asks for nothing, so it is accepted
    advice: str


_TENSOR_PARALLEL: Final = (
    "this module computes with the whole weight. For tensor parallel layers use gtp.modules.ColumnParallelLinear and "
    "RowParallelLinear"
)
_OVERLAP: Final = "userbuffers are Transformer Engine's. Collective GEMMs choose their overlap with tp_gemm_backend"

_REFUSALS: Final = (
    _Refusal("sequence_parallel", False, _TENSOR_PARALLEL),
    _Refusal("tp_group", None, _TENSOR_PARALLEL),
    _Refusal("tp_size", 1, _TENSOR_PARALLEL),
    _Refusal("parallel_mode", None, _TENSOR_PARALLEL),
    _Refusal("symmetric_ar_type", None, _TENSOR_PARALLEL),
    _Refusal("return_layernorm_output_gathered", False, _TENSOR_PARALLEL),
    _Refusal("ub_overlap_ag", False, _OVERLAP),
    _Refusal("ub_overlap_rs", False, _OVERLAP),
    _Refusal("ub_overlap_rs_dgrad", False, _OVERLAP),
    _Refusal("ub_bulk_dgrad", False, _OVERLAP),
    _Refusal("ub_bulk_wgrad", False, _OVERLAP),
    _Refusal("ub_name", None, _OVERLAP),
    _Refusal("parameters_split", None, "make one module per part: each is then a weight with a name of its own"),
    _Refusal(
        "fuse_wgrad_accumulation",
        False,
        "leave it out: the wgrad is added to main_grad wherever the weight has main_grad and grad_added_to_main_grad",
    ),
    _Refusal(
        "delay_wgrad_compute",
        False,
        "the wgrad is computed first here, so that its reduction runs beside the dgrad; leave it out",
    ),
    _Refusal(
        "get_rng_state_tracker",
        None,
        "weights are initialized in full and then cut, from torch's default generator; seed it alike on all ranks",
    ),
    _Refusal(
        "rng_tracker_name",
        None,
        "weights are initialized in full and then cut, from torch's default generator; seed it alike on all ranks",
    ),
    _Refusal("save_original_input", False, "the input is kept as it is given; leave it out"),
    _Refusal("name", None, "weights are named by their place in the model; leave it out"),
)


def refuse_arguments(module: str, given: Mapping[str, object]) -> None:
    """Refuses what a constructor got beyond its own arguments.

    Raises:
        TypeError: an unknown argument, as Python itself raises it.
        UnsupportedError: one of Transformer Engine with another value than its default; the message says what to do
            instead.
    """
    refusals = {r.argument: r for r in _REFUSALS}
    for argument, value in given.items():
        refusal = refusals.get(argument)
        if refusal is None:
            raise TypeError(f"{module}() got an unexpected keyword argument {argument!r}")
        if value is not refusal.default and value != refusal.default:
            raise UnsupportedError(f"{module}({argument}={value!r}) is not supported: {refusal.advice}")


def init_normal(weight: torch.Tensor) -> None:
    """Transformer Engine's default `init_method`: normal, mean 0, standard deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)
