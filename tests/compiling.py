"""A compiler for one test: nothing compiled is there before, or left after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch._dynamo
import torch._dynamo.guards
import torch._dynamo.utils

# Dynamo's account of every compilation, for its logs: all settings as JSON, and how long guards take when the caches
# are cold. Of these small models' compilations it is a third.
_ACCOUNTS = (
    (torch._dynamo.guards, "profile_guard_manager", 0.0),
    (torch._dynamo.utils, "_scrubbed_inductor_config_for_logging", None),
    (torch._dynamo.utils, "_get_dynamo_config_for_logging", None),
    (torch._dynamo.utils, "_compiler_config_for_logging", None),
)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Within it, `torch.compile` begins anew, and its counters at zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with ExitStack() as unaccounted:
        for module, name, nothing in _ACCOUNTS:
            if hasattr(module, name):  # they are torch's own, and come and go
                # no Mock, which keeps what it is called with
                unaccounted.enter_context(mock.patch.object(module, name, lambda *_, nothing=nothing: nothing))
        try:
            yield
        finally:
            torch._dynamo.reset()
