"""Gradient clipping and optimizers that need more than this rank's rows."""
