"""Programs on gloo end with exit code 0, whatever collective was their last."""

from __future__ import annotations

import pytest

from tests.processes import Ended

PROGRAM = """
import atexit, gc, os, sys, time
import torch
import torch._dynamo  # gtp's first model does; once for all children
import torch.distributed as dist
import gtp

class Late:
    '''Goes while Python ends, and gives other threads the time to ask for the GIL then.'''
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(0.1)

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    gtp.shard_model(model, dist.group.WORLD)
    model(torch.ones(2, 4)).sum().backward()
    # from here on gloo's thread gets the GIL only when it is given away
    sys.setswitchinterval(100)
    dist.all_gather_into_tensor(torch.empty(4_000_000), torch.ones(4_000_000), async_op=True)  # milliseconds
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    return model

torch.set_num_threads(1)
late = Late()
gc.collect()
gc.freeze()
codes = []
for ending in ("plain", "destroyed") * 3:
    pid = os.fork()
    if pid == 0:
        atexit._clear()  # what other libraries do there may give the GIL away
        model = train()
        if ending == "destroyed":
            dist.destroy_process_group()
        sys.exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(*codes)
"""


@pytest.mark.process("-c", PROGRAM)
def test_programs_whose_last_collective_comes_right_before_their_end_exit_with_0(process: Ended) -> None:
    """With the model alive, which holds the process group, and the group destroyed or not. Without gtp's wait at exit
    gloo's thread has not let go of the last tensor yet, and most of these end with SIGABRT."""
    assert process.stdout.split() == ["0"] * 6
