"""Fixtures of every test. Multi-rank tests take `ranks`; see gtp/testing/ranks.py for what a rank can do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from gtp.testing.rank_processes import RankTemplates
from gtp.testing.ranks import RankPools
from tests import processes, second_process

# a property's time says how busy the machine is, not whether it holds
hypothesis.settings.register_profile("gtp", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("gtp")
# references computed here must round as ranks do, and how a GEMM is cut over threads changes how it rounds
torch.set_num_threads(1)


TEMPLATES = pytest.StashKey[RankTemplates | None]()
"""Of this session's ranks. None where there is a GPU: what its libraries did before a fork does not work after it."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """A session over folders will want ranks: their templates import torch beside the collection of its tests."""
    config = session.config
    # an optimizer's first step imports torch._dynamo, which takes more than a second
    templates = config.stash[TEMPLATES] = None if torch.cuda.is_available() else RankTemplates(["torch._dynamo"])
    folders = all((config.invocation_params.dir / argument).is_dir() for argument in config.args)
    if templates is not None and folders and not config.option.collectonly:
        templates.prepare(4)


@pytest.hookimpl(trylast=True)  # fixtures end before
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (templates := session.config.stash[TEMPLATES]) is not None:
        templates.close()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPools]:
    """`ranks(world_size)` is a `RankPool` whose processes live across tests."""
    pools = RankPools(templates=pytestconfig.stash[TEMPLATES])
    yield pools
    pools.close()


@pytest.fixture(scope="session", autouse=True)
def started_processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """From the first test on, programs of tests marked `process` run. See tests/processes.py."""
    started = processes.Processes(request.session.items, tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture
def process(started_processes: processes.Processes, request: pytest.FixtureRequest) -> processes.Ended:
    """The program of this test, which has ended with exit code 0."""
    return started_processes.ended(request.node)


def pytest_collection_finish() -> None:
    """What imports and the collection of tests leave is not looked through again: a garbage collection over it takes
    most of a second, and tests that count what lives ask for several each."""
    gc.collect()
    gc.freeze()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    templates = session.config.stash[TEMPLATES]
    if templates is None:
        return None
    return second_process.run(session, after_fork=lambda: _set_up_again(templates))


def _set_up_again(templates: RankTemplates) -> None:
    templates.leave()
    # After a fork torch makes its thread pool and autograd's threads anew, at their first use: here, in one thread. In
    # a first backward after a FakeTensorMode, autograd makes eight, for devices that are not there, and all of them ask
    # for the pool. In one run a native thread aborted there.
    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).backward()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker(processes.MARK) is not None]
    for item in marked:
        item.add_marker(pytest.mark.timeout(processes.PATIENCE + 20))
    # the rest in their order, and then these: their programs have run by then
    items.sort(key=lambda item: item.get_closest_marker(processes.MARK) is not None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
