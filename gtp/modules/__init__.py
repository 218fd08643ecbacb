"""Modules over `gtp.ops`. They know the protocol alone: the same module runs on plain weights, fakes and shards."""
