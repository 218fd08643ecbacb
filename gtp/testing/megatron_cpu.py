"""`megatron_on_cpu`: what Megatron-Core needs so that it runs on CPU ranks with gloo. Never used where a GPU is.

Megatron-Core asks CUDA for its device, its streams and its random state at fixed places. Inside the context manager
these answer for the CPU, and tensors that Megatron makes "on cuda" are made on the CPU. Nothing else of Megatron is
changed: its layers, its DistributedDataParallel, its optimizers, its schedules and its checkpoints are the real ones.

| Megatron asks | it gets |
|---|---|
| `torch.cuda.current_device()` | the CPU device |
| `device="cuda"` in a tensor factory, `.cuda()`, `.to("cuda")` | the CPU |
| `torch.cuda.current_stream()`, `Stream`, `Event` | objects whose waits do nothing: a CPU call ends when it returns |
| pinned memory | plain memory |
| `all_gather` of tensors of different sizes | broadcasts: gloo refuses it |
| `torch.cuda.synchronize()`, `torch.cuda.empty_cache()` | nothing to do |
| `torch.cuda.FloatTensor` and friends | the CPU tensor type of the same name |
| `tensor.type()` | the name of the CUDA tensor type: its optimizers accept no other |
| to read split sizes of an all-to-all back | the numpy array it expects from that |
| its tracker of CUDA random states | the same named states, kept for the CPU generator |
| the Adam of Apex or Transformer Engine | torch's, with the step number where these have it (checkpoints need that) |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from gtp.errors import GTPStateError, MissingExtraError, UnsupportedError

_CPU = torch.device("cpu")


class _MadeOnCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if kwargs and "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is dist.all_gather and len({t.shape for t in args[0]}) > 1:
            return _all_gather_uneven(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _all_gather_uneven(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> None:
    """NCCL gathers tensors of different sizes, gloo does not."""
    if async_op:
        raise UnsupportedError("all_gather of different sizes on CPU ranks is synchronous: pass async_op=False")
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, group=group, group_src=rank)


def _names_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """A stream of a device on which every call has ended when it returns."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = _CPU

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return event if isinstance(event, _Event) else _Event()

    def synchronize(self) -> None: ...


class _Event:
    """An event that is past as soon as it is recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Adam(torch.optim.AdamW):
    """torch's AdamW with the interface of Apex's FusedAdam: the step number belongs to the parameter group.

    With the step in each parameter's state, as torch has it, Megatron's DistributedOptimizer can save but not load.
    """

    def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's Adam insists on a step in each state here
        torch.optim.Optimizer.__setstate__(self, state)

    def step(self, closure: Any = None) -> Any:
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]:
                    self.state[parameter]["step"] = torch.tensor(float(group.get("step", 0)))
        loss = super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].pop("step", None)
        return loss


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's experts read split sizes back from the GPU, as numpy arrays; here they need not travel."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _tracker_add(tracker: Any, name: str, seed: int) -> None:
    """`CudaRNGStatesTracker.add` for the CPU generator."""
    if seed in tracker.seeds_ or name in tracker.states_:
        raise GTPStateError(f"random state {name!r} with seed {seed}: the name or the seed was added before")
    tracker._is_initialized = True
    tracker.seeds_.add(seed)
    tracker.states_[name] = torch.Generator().manual_seed(seed).get_state()


@contextlib.contextmanager
def _tracker_fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """`CudaRNGStatesTracker.fork` for the CPU generator: draws inside come from, and advance, the named state."""
    if name not in tracker.states_:
        raise GTPStateError(
            f"random state {name!r} was not added: call megatron.core.tensor_parallel.model_parallel_cuda_manual_seed "
            "after initialize_model_parallel"
        )
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Within it, Megatron-Core builds, trains and saves models on CPU ranks. See the module's table.

    Enter it before the first Megatron call of the process that touches a device, and leave it after the last.

    Raises:
        GTPStateError: a GPU is there. Run Megatron on it, or hide it with CUDA_VISIBLE_DEVICES="".
        MissingExtraError: megatron-core is not installed.
    """
    if torch.cuda.is_available():
        raise GTPStateError(
            f"megatron_on_cpu was entered with {torch.cuda.device_count()} GPU(s) visible. It is for machines "
            'without one: leave it out, or set CUDA_VISIBLE_DEVICES="" before the process starts'
        )
    try:
        from megatron.core import optimizer
        from megatron.core.optimizer import distrib_optimizer
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer.moe import token_dispatcher
    except ImportError as error:
        raise MissingExtraError(
            "megatron_on_cpu needs megatron-core, gtp's extra 'megatron': pip install 'megatron-core>=0.19,<0.20'"
        ) from error

    stream = _Stream()
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "default_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "manual_seed", lambda seed: None),
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "FloatTensor", torch.FloatTensor),
        (torch.cuda, "IntTensor", torch.IntTensor),
        (torch.cuda, "LongTensor", torch.LongTensor),
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _split_sizes),
        (megatron_random.CudaRNGStatesTracker, "add", _tracker_add),
        (megatron_random.CudaRNGStatesTracker, "fork", _tracker_fork),
    ]
    if optimizer.USING_PYTORCH_OPTIMIZER:
        replacements += [
            (optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (optimizer, "Adam", _Adam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
        ]
    with contextlib.ExitStack() as undo:
        for owner, name, value in replacements:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        undo.enter_context(_MadeOnCpu())
        yield
