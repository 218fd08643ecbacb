"""gtp behind Megatron-Core's own flag, in one call. A whole training run: examples/pretrain_gpt.py."""

import gtp.megatron

gtp.megatron.install()  # once per process, before the model is built

# ... then Megatron as ever:
#   parallel_state.initialize_model_parallel(gtp_remat_size=2)
#   config = TransformerConfig(..., tensor_parallel_num_weight_shards=2)
#   model = GPTModel(config, ...)
gtp.megatron.uninstall()
