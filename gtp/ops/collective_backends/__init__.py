"""Backends of the collective GEMMs: how activations move beside the GEMM. `gemm_backend` makes one from its name."""

from gtp.ops.collective_backends.base import Factor, Gathering, GemmBackend
from gtp.ops.collective_backends.choose import BackendName, gemm_backend, resolve_group
from gtp.ops.collective_backends.collective import CollectiveBackend, SingleRankBackend

__all__ = [
    "BackendName",
    "CollectiveBackend",
    "Factor",
    "Gathering",
    "GemmBackend",
    "SingleRankBackend",
    "gemm_backend",
    "resolve_group",
]
