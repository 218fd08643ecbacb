"""Weights that are gathered again in backward must be those of forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gtp.errors import GTPStateError
from gtp.protocol import describe_weight

_plain = torch._C.DisableTorchFunctionSubclass


class ShardVersions:
    """Remembers at forward which values the weights had, so that backward can refuse to re-gather others."""

    __slots__ = ("_versions",)

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        with _plain():
            self._versions = [w._version for w in weights]

    def check(self, weights: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            GTPStateError: a weight was written since. torch raises in the same place for a plain weight.
        """
        with _plain():
            now = [w._version for w in weights]
        if now == self._versions:
            return
        for weight, before, after in zip(weights, self._versions, now, strict=True):
            if before != after:
                raise GTPStateError(
                    f"{describe_weight(weight)} was changed in place between its forward and this backward (version "
                    f"{before} became {after}), so the gradient of its input cannot be computed. Step the optimizer "
                    "after the last backward that uses the old values"
                )
