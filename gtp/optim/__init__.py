"""Gradient clipping and optimizers that need more than this rank's rows."""

from gtp.optim.clip import clip_grad_norm_, grad_norm
from gtp.optim.muon import Muon, orthogonalize

__all__ = ["Muon", "clip_grad_norm_", "grad_norm", "orthogonalize"]
