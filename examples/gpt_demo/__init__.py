"""Parts of examples/pretrain_gpt.py: the text, the Megatron model, the report and its plots."""
