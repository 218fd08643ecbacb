"""The contract between code that runs GEMMs and code that owns shards. Imports torch and typing_extensions only."""

from gtp.protocol.contract import DistributedWeight, Outcome
from gtp.protocol.dispatch import (
    describe_weight,
    finalize_weight_grads,
    is_distributed_weight,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
    outcome_of,
    weight_grad_buffers,
)

__all__ = [
    "DistributedWeight",
    "Outcome",
    "describe_weight",
    "finalize_weight_grads",
    "is_distributed_weight",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
    "outcome_of",
    "weight_grad_buffers",
]
