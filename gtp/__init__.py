"""gtp: Generalized Tensor Parallelism for PyTorch. Every weight is one shard per rank, gathered just in time."""

from gtp.checkpoint import full_state_dict, load_full_state_dict
from gtp.config import GTPConfig
from gtp.errors import (
    DesyncError,
    GTPError,
    GTPStateError,
    GTPValueError,
    MissingExtraError,
    PeerError,
    ProtocolError,
    UnsupportedError,
)
from gtp.optim.clip import clip_grad_norm_, grad_norm
from gtp.protocol import DistributedWeight, Outcome
from gtp.runtime.runtime import GTPRuntime
from gtp.weights.axes import data_mean, data_size
from gtp.weights.full import full_weights
from gtp.weights.graphed import make_graphed_callables
from gtp.weights.layout import ShardLayout
from gtp.weights.parameter import GTPWeight
from gtp.weights.shard import shard_model

__all__ = [
    "DesyncError",
    "DistributedWeight",
    "GTPConfig",
    "GTPError",
    "GTPRuntime",
    "GTPStateError",
    "GTPValueError",
    "GTPWeight",
    "MissingExtraError",
    "Outcome",
    "PeerError",
    "ProtocolError",
    "ShardLayout",
    "UnsupportedError",
    "clip_grad_norm_",
    "data_mean",
    "data_size",
    "full_state_dict",
    "full_weights",
    "grad_norm",
    "load_full_state_dict",
    "make_graphed_callables",
    "shard_model",
]

__version__ = "0.1.0"
