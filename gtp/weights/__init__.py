"""Sharded parameters: layout arithmetic, `GTPWeight`, its gradient, and `shard_model`."""
