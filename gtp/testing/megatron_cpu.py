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
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, MissingExtraError

_CPU = torch.device("cpu")


_FACTORIES = (
    "arange", "asarray", "as_tensor", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _made_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes on the CPU what it is asked to make on CUDA.

    A TorchFunctionMode would do that in one place, and look at every call of torch: a fifth of a small model's step.
    """

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _tensor_to(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    on_cpu = _made_on_cpu(to)

    @functools.wraps(to)
    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        return on_cpu(tensor, *args, **kwargs)

    return moved


def _tensor_cuda(cuda: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(cuda)
    def stays(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    return stays


def _tensor_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        # a subclass may have asked this function itself
        asked = not args and not kwargs and not answer.startswith("torch.cuda.")
        return answer.replace("torch.", "torch.cuda.") if asked else answer

    return named


def _all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(outputs: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        uneven = len({t.shape for t in outputs}) > 1
        return (_all_gather_uneven if uneven else all_gather)(outputs, tensor, *args, **kwargs)

    return gathered


def _names_made_on_cpu() -> list[tuple[Any, str, Any]]:
    """Owner, name and replacement of what makes or moves tensors.

    Of methods, subclasses of tensors are asked for the replacement: torch looks for the name. So it has the same name.
    Imports make tables of torch's functions, by the functions themselves, and so does the first use of a device as a
    context manager. Those that Megatron causes are made before anything is replaced.
    """
    importlib.import_module("torch._dynamo")
    with _CPU:
        torch.empty(0)
    return [
        *[(torch, name, _made_on_cpu(getattr(torch, name))) for name in _FACTORIES],
        *[(torch.Tensor, name, _made_on_cpu(getattr(torch.Tensor, name))) for name in _METHODS],
        (torch.Tensor, "to", _tensor_to(torch.Tensor.to)),
        (torch.Tensor, "cuda", _tensor_cuda(torch.Tensor.cuda)),
        (torch.Tensor, "type", _tensor_type(torch.Tensor.type)),
        (dist, "all_gather", _all_gather(dist.all_gather)),
    ]


def _all_gather_uneven(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> _Ended | None:
    """NCCL gathers tensors of different sizes, gloo does not. Has ended when it returns, also with `async_op`."""
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, group=group, group_src=rank)
    return _Ended() if async_op else None


class _Ended:
    """The handle of a collective that has ended."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


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
        *_names_made_on_cpu(),
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
            # what a class inherits is inherited again
            if name in vars(owner):
                undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield
