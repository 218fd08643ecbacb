"""gtp behind Megatron-Core's own flag, `tensor_parallel_num_weight_shards`.

import gtp.megatron
gtp.megatron.install()
parallel_state.initialize_model_parallel(gtp_remat_size=2)
model = GPTModel(TransformerConfig(tensor_parallel_num_weight_shards=2, ...), ...)     # has sharded weights
"""

from gtp.megatron.backend import SUPPORTED, install, installation, uninstall
from gtp.megatron.swap import runtime_of, runtimes_of, swap_parameters
from gtp.megatron.weight import MegatronGTPWeight

__all__ = [
    "SUPPORTED",
    "MegatronGTPWeight",
    "install",
    "installation",
    "runtime_of",
    "runtimes_of",
    "swap_parameters",
    "uninstall",
]
