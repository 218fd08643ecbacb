"""`GTPRuntime`: everything that happens between the weights of one model and the wire.

The state of a sharded model hangs off one runtime, and the runtime lives as long as the model: its weights and the
hooks on its root module hold it, and it holds them weakly. There is nothing to reset, and the transport is shut down
when the runtime goes.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gtp.config import GTPConfig
from gtp.errors import GTPStateError, UnsupportedError
from gtp.runtime.backward import NO_TASK, BackwardTracker, backward_task
from gtp.runtime.bracket import Bracket
from gtp.runtime.capture import current_capture
from gtp.runtime.checked import CheckedTransport
from gtp.runtime.gloo_exit import wait_for_gloo_at_exit
from gtp.runtime.group import WeightGroup
from gtp.runtime.lines import Lines
from gtp.runtime.parts import Parts
from gtp.runtime.pools import make_pools, prefetch_window, reduce_window
from gtp.runtime.reduction import Reducer
from gtp.runtime.reduction_order import ReductionOrder
from gtp.runtime.replicated import ReplicatedGradients
from gtp.runtime.residency import Gatherer
from gtp.runtime.returned import ReturnedGradients
from gtp.runtime.schedule import Phase, Schedule
from gtp.runtime.stats import RuntimeStats
from gtp.runtime.tracing import (
    dispatch_modes,
    fx_trace,
    in_selective_checkpoint,
    jit_trace,
    refuse_tracing,
    without_dispatch_modes,
)
from gtp.runtime.transport import Transport

_log = logging.getLogger("gtp")


class GTPRuntime:
    """Gathers the weights of one model just in time and reduces their gradients.

    Made by `gtp.shard_model`. What users call: `stats`, `trace`, `no_sync`, `release`.

    Args:
        config: Settings.
        transport: Moves the bytes.
    """

    def __init__(self, config: GTPConfig, transport: Transport, device: torch.device, transport_reason: str) -> None:
        if config.debug:
            transport = CheckedTransport(transport, config.debug_timeout)
        self.config = config
        self.device = device
        self.report: Any = None  # `gtp.weights.report.ParameterReport`, a room below; print it
        self.before_gather: Callable[[WeightGroup], bool] | None = None  # see `Gatherer`; set before the first use
        self._transport = transport
        weakref.finalize(self, transport.shutdown)
        wait_for_gloo_at_exit()
        self._transport_reason = transport_reason
        self._groups: list[WeightGroup] = []
        self._started = False
        self._on_cuda = device.type == "cuda"  # where there are captures
        self._capture = 0
        self._parts = Parts()
        self.returned = ReturnedGradients(self._parts, begin_work=_weakly(self._ready))
        self._order = ReductionOrder()
        self.replicated = ReplicatedGradients(
            transport,
            mean=config.grad_reduce == "mean",
            order=self._order,
            on_gradient=_weakly(self._enter_backward),
        )
        self._backward = BackwardTracker(
            _weakly(self._end_of_backward), _weakly(self._put_gradients_back), _weakly(self._abandon)
        )

    # -- building ------------------------------------------------------------------------------------------------

    def add_group(self, group: WeightGroup) -> None:
        """Registers the next weight group; `group.index` is its position. In the same order on all ranks.

        Raises:
            GTPStateError: the runtime is in use already.
        """
        if self._started:
            raise GTPStateError(
                f"{group.name}: this runtime has gathered weights already and its schedule is laid out; "
                "shard all weights of a model before its first forward"
            )
        if group.index != len(self._groups):
            raise GTPStateError(f"{group.name}: group index {group.index} is not the next one, {len(self._groups)}")
        self._groups.append(group)

    @property
    def groups(self) -> Sequence[WeightGroup]:
        """The weight groups, in order of index."""
        return tuple(self._groups)

    def start(self) -> None:
        """Lays out the schedule and prepares the transport. Collective. Called by the first use, if not before."""
        if self._started:
            return
        groups, config = self._groups, self.config
        self._transport.prepare(groups)
        for member in (m for g in groups for m in g.members):
            owner = member.owner()
            if owner is not None and owner.plain_shard().data_ptr() != member.shard.data_ptr():
                owner.adopt(member.shard)
        window = prefetch_window(groups, config)
        new_schedule = functools.partial(
            Schedule, [g.gathered_nbytes for g in groups], prefetch_bytes=window, keep_bytes=config.keep_bytes
        )
        self._schedule = new_schedule()
        self._pools = self._eager_pools = make_pools(groups, config, self.device)
        self._gatherer = Gatherer(groups, self._schedule, self._pools.gathers, self._transport, self.before_gather)
        self._reducer = Reducer(
            groups, self._pools.wgrads, self._transport, config, reduce_window(groups, config), self._order
        )
        self._lines = Lines(
            self._gatherer,
            self.replicated,
            self._parts,
            new_schedule,
            groups,
            begin_work=_weakly(self._ready),
            abandon=_weakly(self._abandon),
        )
        self._started = True
        _log.info(
            "gtp: %d weight groups over %s, %.1f MiB gathered, transport %s (%s)",
            len(groups), self.device, sum([g.gathered_nbytes for g in groups]) / 2**20, self._transport.name,
            self._transport_reason,
        )  # fmt: skip

    def attach(self, root: torch.nn.Module) -> None:
        """Brackets the forwards of `root`: within them weights are prefetched."""
        bracket = Bracket(self)
        root.register_forward_pre_hook(bracket.before)
        root.register_forward_hook(bracket.after, always_call=True)

    # -- lines ---------------------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """A forward of the whole model begins. One recomputed in a backward changes nothing."""
        if backward_task() == NO_TASK:
            with torch.inference_mode(False):
                self._ready()
            self._lines.enter_forward()

    def exit_forward(self) -> None:
        """The forward has ended, by return or by exception."""
        if backward_task() == NO_TASK:
            self._lines.exit_forward()

    @property
    def lines(self) -> Lines:
        """When lines begin and end. There is none before `start`."""
        return self._lines

    def before_write(self, groups: Sequence[WeightGroup]) -> None:
        """Shards of these groups are about to be written in place."""
        if self._started:
            self._gatherer.before_write(groups)

    # -- the contract's side -------------------------------------------------------------------------------------

    def materialize(self, group: WeightGroup, phase: Phase) -> list[torch.Tensor]:
        """Full weights `[rows, *trailing]` of a group, plain tensors in the compute dtype.

        Raises:
            UnsupportedError: the forward is being traced.
        """
        if dispatch_modes() or jit_trace() is not None or fx_trace():
            refuse_tracing(group.name)
            if in_selective_checkpoint():
                # It is to see what the model computes, which is the same when it is computed again. What the runtime
                # does depends on what was gathered ahead, and one gather's results would be handed to another.
                with without_dispatch_modes():
                    return self.materialize(group, phase)
        if group.size == 1:
            return [m.shard.to(group.compute_dtype)[: m.rows] for m in group.members]
        task = self._ready()
        inside = True
        if task == NO_TASK:
            inside = self._lines.in_forward
        else:
            if phase is Phase.FORWARD:
                phase = Phase.RECOMPUTE
            if self._parts.added:
                self._lines.enter_part_backward(group, task)
        if self.config.debug:
            self._transport.agree(group.process_group, f"use {group.name} in {phase.name.lower()}")
        if torch.is_inference_mode_enabled():
            # Pooled memory outlives the mode, and what is written through an inference tensor could not be reused.
            with torch.inference_mode(False), torch.no_grad():
                return self._lines.consume(group, phase, inside)
        return self._lines.consume(group, phase, inside)

    def grad_buffer(self, group: WeightGroup, position: int) -> torch.Tensor:
        """Where the wgrad of one member goes, `[rows, *trailing]`."""
        task = self._ready()
        if self._parts.added and task != NO_TASK:
            self._lines.enter_part_backward(group, task)
        return self._reducer.grad_buffer(group, position)

    def finalize(self, group: WeightGroup, wgrads: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """Starts the reduction of a group's wgrads; they are delivered before backward ends, or at once outside one.
        None stands for a weight that had no part in what was differentiated.

        Returns:
            None; inside `returned.asked_for` the reduced gradients `[shard_rows, *trailing]`, one per weight.
        """
        task = self._ready()
        if self.returned.asked:
            # at the end of a part's own backward nobody has read them; who runs one inside of it may, and so does
            # anomaly mode
            own = self._gatherer.in_part and task == self._parts.task
            at_once = not own or torch.is_anomaly_enabled()
            return self._reducer.reduce_returned(group, wgrads, at_once=at_once)
        self._reducer.finalize(group, wgrads)
        if task == NO_TASK:
            try:
                self._end_of_backward()
            except BaseException:
                self._abandon()  # inside a backward, its tracker sees to that
                raise
        return None

    # -- for users -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank and reduce nothing; the next one outside reduces the sum.

        Memory: one full-size fp32 gradient per weight that received one, per rank (4 bytes x all parameters), until
        then. Reducing every backward, the default, holds 1/N of that. Inside, a `.grad` of None becomes zeros, and
        others do not change. Zeroing gradients drops what is held with them, and so does `release()`.
        """
        self._ready()
        before = self._reducer.accumulate_only
        self._set_accumulate_only(True)
        try:
            yield
        finally:
            self._set_accumulate_only(before)

    def stats(self) -> RuntimeStats:
        """Counters since the runtime was made. Cheap; no synchronization."""
        self.start()
        counters = self._schedule.counters
        return RuntimeStats(
            transport=self._transport.name,
            transport_reason=self._transport_reason,
            consumes=counters.consumes,
            prefetch_hits=counters.hits,
            on_demand_gathers=counters.misses,
            wrong_guesses=counters.wrong_guesses,
            kept=counters.kept,
            bytes_gathered=self._gatherer.bytes_gathered,
            bytes_reduced=self._reducer.bytes_reduced,
            peak_leased_bytes=self._eager_pools.gathers.peak_leased_bytes,
            peak_wgrad_bytes=self._eager_pools.wgrads.peak_leased_bytes,
            unreduced_bytes=self._reducer.held_bytes,
        )

    def trace(self) -> list[tuple[str, str]]:
        """The consumes of the last stretch between lines, as (weight group's name, phase's name)."""
        self.start()
        return [(self._groups[index].name, Phase(phase).name.lower()) for index, phase in self._schedule.trace]

    def release(self) -> None:
        """Gives all pooled memory back to the allocator, and drops gradients that `no_sync` accumulated unreduced.

        The model stays usable. Also what to call after an exception, when memory is needed before the next forward.
        """
        if not self._started:
            return
        self._reducer.discard_held()
        self.replicated.discard_held()
        if self._on_cuda and (capture := current_capture(self.device)) != self._capture:
            self._switch(capture)  # what a graph has is no longer ours
        self._abandon()
        for pool in self._pools:
            pool.trim()

    @property
    def transport(self) -> Transport:
        """What moves the bytes."""
        return self._transport

    # -- inside --------------------------------------------------------------------------------------------------

    def _ready(self) -> int:
        """To be called first by all work: starts at the first use, and cleans up if a backward has died.

        Returns:
            The running backward's task, or `NO_TASK`.
        """
        if not self._started:
            self.start()
        if self._on_cuda and (capture := current_capture(self.device)) != self._capture:
            self._switch(capture)
        task = backward_task()
        if task != self._backward.current:
            self._backward.enter(task)
        return task

    def _switch(self, capture: int) -> None:
        """A CUDA graph capture begins or has ended: see [Note: captures].

        Raises:
            GTPStateError: something is going on that would belong to both sides. Nothing has changed then.
        """
        pools = make_pools(self._groups, self.config, self.device) if capture else self._eager_pools
        if capture:
            self._gatherer.require_no_line()
        self._reducer.switch(pools.wgrads, ends=bool(self._capture))
        self._gatherer.switch(pools.gathers, capture)
        if self._capture:
            self._pools.gathers.end()
        self._capture, self._pools = capture, pools

    def _enter_backward(self) -> None:
        if backward_task() != NO_TASK:
            self._ready()

    def _abandon(self) -> None:
        """A forward or backward raised: nothing of it is delivered, nothing stays in flight."""
        self._backward.forget()
        self._order.reset()
        self._lines.forget_forward()
        self._reducer.abandon()
        self._put_gradients_back()
        self._gatherer.drop_all()

    def _put_gradients_back(self) -> None:
        self.replicated.abandon()
        self.returned.abandon()

    def _end_of_backward(self) -> None:
        self._reducer.flush_held()
        parameters = self.replicated.end_backward()  # raises if ranks disagree
        owners = self._reducer.end_backward()
        if self.returned.sums:
            others = self.returned.deliver()
            if not self._reducer.accumulate_only:  # which ends with no sum complete
                owners = list(dict.fromkeys([*owners, *others]))
        self._order.reset()
        self._gatherer.close_line()
        self._backward.forget()
        # Hooks may step an optimizer: only now may shards be written.
        with torch.no_grad():
            for owner in owners:
                owner.run_gradient_hooks()
            self.replicated.run_hooks(parameters)

    def _set_accumulate_only(self, value: bool) -> None:
        self._reducer.accumulate_only = value
        self.replicated.accumulate_only = value

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a GTPRuntime holds process groups, streams and buffers, and cannot be copied or pickled: "
            "save state dicts (gtp.checkpoint), and call gtp.shard_model on the copy of the plain model"
        )


def _weakly(method: Callable[[], object]) -> Callable[[], None]:
    """`method` for a part of its object to call: without it, deleting a model would free its memory only when the
    cyclic garbage collector comes by."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
