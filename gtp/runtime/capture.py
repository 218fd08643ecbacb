"""CUDA graph capture, as the runtime sees it.

[Note: captures] What a graph uses must be the graph's: memory from its private pool, events recorded inside it, side
streams that have joined by its end. So a capture has buffer pools of its own, which end with it, and copies that were
gathered outside are not used inside, nor the reverse. A line that begins inside a capture (forward and backward of a
whole step) prefetches as eager code does, since it also ends inside. So do the lines of a part, which
`gtp.make_graphed_callables` captures (see [Note: parts]). In any other capture that holds less than a line, every
consume gathers on demand and is done before the next.
"""

from __future__ import annotations

import torch

from gtp.ops import peer


def current_capture(device: torch.device) -> int:
    """Identifies the CUDA graph capture that the current stream is in; 0 if none."""
    if device.type != "cuda" or not torch._C._cuda_isCurrentStreamCapturing():
        return 0
    return peer.current_capture(device.index or 0)
