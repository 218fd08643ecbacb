"""The rank pool: it returns what ranks return, and a rank that fails or hangs is named with its traceback or stacks.

One test: `make test TEST=tests/testing/test_ranks.py::test_results_come_by_rank`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gtp.errors import GTPStateError, GTPValueError
from gtp.testing import ranks as rank_api
from gtp.testing.rank_processes import RankTemplates
from gtp.testing.ranks import RankFailure, RankPool, RankPools, RankTimeout


@pytest.fixture(scope="module")
def pool(ranks: RankPools) -> Iterator[RankPool]:
    """A pool of our own: these tests break it."""
    with RankPool(2, grace=1.0, templates=ranks.templates) as made:
        yield made


def sum_of_ranks(scale: float, extra: int = 0) -> torch.Tensor:
    x = torch.full((3,), scale * (rank_api.rank() + 1) + extra, requires_grad=True) * 1.0
    dist.all_reduce(x)
    return x


KEPT: list[object] = []


def what_collection_sees() -> tuple[int, bool]:
    """How many objects; whether one of this call is among them."""
    mine = [object()]
    seen = {id(o) for o in gc.get_objects()}
    return len(seen), id(mine) in seen


class Cycle:
    def __init__(self) -> None:
        self.me = self


def keep_a_cycle() -> None:
    KEPT.append(Cycle())


def let_go_of_it() -> bool:
    gone = weakref.ref(KEPT.pop())
    gc.collect()
    return gone() is None


def who_am_i() -> tuple[int, int, int, int, int]:
    return os.getpid(), rank_api.rank(), rank_api.world_size(), dist.get_rank(), torch.get_num_threads()


def parent_and_hash() -> tuple[int, int]:
    return os.getppid(), hash("gtp")


def first_of_path() -> str:
    return sys.path[0]


def interrupted(*_: object) -> bool:
    raise KeyboardInterrupt


def draw() -> float:
    return torch.rand(()).item()


def sum_in(members: tuple[int, ...]) -> float | None:
    group = rank_api.subgroup(members)
    assert rank_api.subgroup(members) is group
    if group is None:
        return None
    x = torch.tensor([float(rank_api.rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def threads_that_send() -> int:
    """How many threads this process has beside those in which gloo's collectives run."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len(names) - names.count("pt_gloo_runloop")


def sending_threads_of_new_groups() -> int:
    before = threads_that_send()
    groups = [dist.new_group() for _ in range(5)]
    x = torch.ones(())
    for group in groups:
        dist.all_reduce(x, group=group)
    assert x.item() == dist.get_world_size() ** len(groups)
    # a thread gets its name a moment after its start
    deadline = time.monotonic() + 10
    while (after := threads_that_send()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return after - before


def refusal_of(members: tuple[int, ...]) -> str:
    with pytest.raises(GTPValueError) as caught:
        rank_api.subgroup(members)
    return str(caught.value)


def raise_on(bad: int, collective: bool) -> int:
    print("about to work on", rank_api.rank())
    if rank_api.rank() == bad:
        raise ValueError(f"deliberate on {bad}")
    if collective:
        dist.barrier()
    return rank_api.rank()


def raise_everywhere() -> None:
    raise KeyError("the same on all")


def sleep_on(bad: int, seconds: float) -> str:
    if rank_api.rank() == bad:
        time.sleep(seconds)
    return "done"


def die_on(bad: int) -> None:
    if rank_api.rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_on(bad: int) -> None:
    if rank_api.rank() == bad:
        sys.exit("a script called inside a rank")


def test_collections_leave_out_what_imports_left(pool: RankPool) -> None:
    for objects, mine in pool.run(what_collection_sees):
        assert objects < 10_000  # importing torch leaves more than 100,000
        assert mine
    pool.run(keep_a_cycle)
    assert pool.run(let_go_of_it) == [True, True]


def test_results_come_by_rank(pool: RankPool) -> None:
    first, second = pool.run(sum_of_ranks, 2.0)
    assert torch.equal(first, torch.full((3,), 6.0))
    assert torch.equal(second, first)
    assert not first.requires_grad


def test_each_rank_gets_its_own_arguments(pool: RankPool) -> None:
    results = pool.run(sum_of_ranks, 1.0, per_rank_args=[(10,), (20,)])
    assert [r.tolist() for r in results] == [[33.0] * 3, [33.0] * 3]


def test_processes_stay_and_know_their_place(pool: RankPool) -> None:
    before, after = pool.run(who_am_i), pool.run(who_am_i)
    assert before == after
    assert [entry[1:] for entry in before] == [(0, 2, 0, 1), (1, 2, 1, 1)]
    assert len({entry[0] for entry in before} | {os.getpid()}) == 3


def test_each_run_starts_from_the_same_seed(pool: RankPool) -> None:
    first = pool.run(draw)
    assert first == pool.run(draw)
    assert first[0] == first[1]


def test_subgroups_are_made_once_and_none_outside(ranks: RankPools) -> None:
    pool = ranks(3)
    assert pool.run(sum_in, (0, 2)) == [2.0, None, 2.0]
    assert pool.run(sum_in, (1, 2)) == [None, 3.0, 3.0]
    assert pool.run(sum_in, (0, 2)) == [2.0, None, 2.0]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads as Linux shows them")
def test_new_groups_bring_no_threads_that_wake_by_themselves(pool: RankPool) -> None:
    """Groups that tests leave behind cost the tests after them nothing."""
    assert pool.run(sending_threads_of_new_groups) == [0, 0]


@pytest.mark.parametrize("members", [(), (1, 0), (0, 0), (0, 2), (-1, 0)])
def test_impossible_subgroup_is_refused(pool: RankPool, members: tuple[int, ...]) -> None:
    refusal = f"subgroup({members}): give ascending ranks between 0 and 1, each once"
    assert pool.run(refusal_of, members) == [refusal] * 2


def test_failure_shows_the_traceback_and_where_the_others_wait(pool: RankPool) -> None:
    pids = [entry[0] for entry in pool.run(who_am_i)]
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"test_ranks.raise_on failed on rank 1 of 2") as caught:
        pool.run(raise_on, 1, True, timeout=60.0)
    assert time.monotonic() - began < 20.0
    assert not isinstance(caught.value, RankTimeout)
    assert list(caught.value.failures) == [1]
    assert "ValueError: deliberate on 1" in caught.value.failures[1]
    assert "in raise_on" in caught.value.failures[1]
    assert "in raise_on" in caught.value.stacks[0]
    assert caught.value.outputs == {0: "about to work on 0", 1: "about to work on 1"}
    assert "rank 0 did not answer" in str(caught.value)
    # the process group may be out of step, so the next run has new processes
    assert set(pids).isdisjoint(entry[0] for entry in pool.run(who_am_i))


def test_the_same_failure_on_all_ranks_is_shown_once(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="failed on ranks") as caught:
        pool.run(raise_everywhere)
    assert sorted(caught.value.failures) == [0, 1]
    assert caught.value.stacks == {}
    assert str(caught.value).count("KeyError: 'the same on all'") == 1


def test_hang_shows_the_stacks_of_whoever_hangs(pool: RankPool) -> None:
    assert pool.run(draw)
    with pytest.raises(RankTimeout, match=r"did not end within 1 s on rank 0 of 2 \(rank 1 did\)") as caught:
        pool.run(sleep_on, 0, 100.0, timeout=1.0)
    assert list(caught.value.stacks) == [0]
    assert "in sleep_on" in caught.value.stacks[0]
    # of every thread: the main one and the one that watches the parent
    assert caught.value.stacks[0].count("hread 0x") >= 2
    assert pool.run(sleep_on, 0, 0.0) == ["done", "done"]


def test_a_killed_process_is_named_with_its_signal(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(die_on, 0)
    assert caught.value.failures == {0: "the process ended with signal 9"}


def end_before_a_child(child: Path) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    child.write_text(str(pid))
    os._exit(3)


def test_a_process_that_its_own_child_outlives_is_seen_to_end(pool: RankPool, tmp_path: Path) -> None:
    child = tmp_path / "child"
    try:
        with RankPool(1, templates=pool.templates) as single:
            assert single.run(rank_api.rank) == [0]
            with pytest.raises(RankFailure, match="exit code 3"):
                single.run(end_before_a_child, child)
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_sys_exit_is_a_failure_like_any_other(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="SystemExit: a script called inside a rank"):
        pool.run(exit_on, 1)


def test_local_functions_are_refused_before_anything_runs(pool: RankPool) -> None:
    with pytest.raises(GTPValueError, match="fn must be a function at the top level of a module"):
        pool.run(lambda: None)


def test_wrong_number_of_per_rank_arguments(pool: RankPool) -> None:
    with pytest.raises(GTPValueError, match="per_rank_args needs 2 tuples, one per rank, got 1"):
        pool.run(draw, per_rank_args=[()])


def test_helpers_outside_of_a_rank() -> None:
    with pytest.raises(GTPStateError, match="not inside a rank"):
        rank_api.rank()


def test_world_size_below_one() -> None:
    with pytest.raises(GTPValueError, match="world_size must be at least 1, got 0"):
        RankPool(0)


def test_the_least_recently_used_pool_goes() -> None:
    pools = RankPools(max_ranks=5)
    one, two = pools(1), pools(2)
    assert pools(1) is one
    three = pools(3)
    assert pools(1) is one
    assert pools(3) is three
    assert pools(2) is not two
    pools.close()


needs_templates = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs start afresh")


@needs_templates
def test_ranks_of_templates_do_not_import_again_and_still_differ(ranks: RankPools) -> None:
    """C41: ranks that hash alike would iterate over sets alike, and hide that others do not."""
    with RankPool(2, templates=ranks.templates) as first, RankPool(2, templates=ranks.templates) as second:
        before = first.run(parent_and_hash)
        assert second.run(parent_and_hash) == before
        assert len({parent for parent, _ in before} | {os.getpid()}) == 3
        assert before[0][1] != before[1][1]
        assert first.run(who_am_i)[0][0] != second.run(who_am_i)[0][0]


@needs_templates
def test_a_forked_rank_sees_the_environment_of_its_start(ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    for color in ("red", "green"):
        monkeypatch.setenv("GTP_TEST_COLOR", color)
        with RankPool(1, templates=ranks.templates) as pool:
            assert pool.run(os.getenv, "GTP_TEST_COLOR") == [color]


@needs_templates
def test_a_forked_rank_starts_in_the_folder_of_its_start(
    ranks: RankPools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "here")
    with RankPool(1, templates=ranks.templates) as pool:
        assert pool.run(os.getcwd) == [str(tmp_path)]
        assert pool.run(first_of_path) == [str(tmp_path / "here")]


@needs_templates
def test_a_fork_that_was_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time-out of a test, or Ctrl-C."""
    templates = RankTemplates()
    with RankPool(1, templates=templates) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("gtp.testing.rank_processes._Template.hear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.run(who_am_i)
        for _ in range(2):
            assert pool.run(rank_api.rank) == [0]
            pool.close()
    templates.close()


@needs_templates
def test_ranks_end_with_their_template_and_the_next_run_starts_another() -> None:
    templates = RankTemplates()
    with RankPool(1, templates=templates) as pool:
        template = pool.run(parent_and_hash)[0][0]
        rank = pool.run(who_am_i)[0][0]
        os.kill(template, signal.SIGKILL)
        _wait_for_the_end_of([rank])
        another = pool.run(parent_and_hash)[0][0]
        assert another != template
        rank = pool.run(who_am_i)[0][0]
        templates.close()
        _wait_for_the_end_of([rank, another])


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, signal
        from tests.testing.test_ranks import parent_and_hash, who_am_i
        from gtp.testing.ranks import RankPool
        from gtp.testing.rank_processes import RankTemplates
        if __name__ == "__main__":
            fresh, forked = RankPool(1), RankPool(1, templates=RankTemplates())
            ranks = [pool.run(who_am_i)[0][0] for pool in (fresh, forked)]
            print(*ranks, forked.run(parent_and_hash)[0][0], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    path = tmp_path / "script.py"
    path.write_text(script)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, env=env, timeout=250, check=False)
    assert done.returncode == -signal.SIGKILL
    _wait_for_the_end_of([int(pid) for pid in done.stdout.split()])


def _wait_for_the_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + 10.0
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    """Whether a thread of the process runs; one that has ended but was not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except FileNotFoundError:
        return False
