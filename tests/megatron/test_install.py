"""`install` and `uninstall` in this process: what they replace, restore and refuse. No process group."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gtp
import gtp.megatron
from gtp.megatron.surface import API, BOUND_AT_IMPORT, WRAPPED_METHODS
from tests.processes import Ended


@pytest.fixture
def api() -> Iterator[ModuleType]:
    module = importlib.import_module("megatron.core.tensor_parallel.gtp_api")
    assert gtp.megatron.installation() is None
    yield module
    if gtp.megatron.installation() is not None:
        gtp.megatron.uninstall()


def bound() -> dict[tuple[str, str], Any]:
    return {
        (entry.module, name): getattr(sys.modules[entry.module], name)
        for entry in BOUND_AT_IMPORT
        for name in entry.names
        if entry.module in sys.modules
    }


def wrapped_methods() -> list[Any]:
    found = []
    for entry in WRAPPED_METHODS:
        owner, method = entry.name.split(".")
        found.append(getattr(getattr(importlib.import_module(entry.module), owner), method))
    return found


def test_everything_is_replaced_and_restored(api: ModuleType):
    importlib.import_module("megatron.core.transformer.cuda_graphs")
    methods_before = wrapped_methods()  # imports their modules, as install does
    before, bound_before = dict(vars(api)), bound()
    gtp.megatron.install()
    for entry in API:
        served = getattr(api, entry.name)
        assert served is True if entry.name == "HAVE_GTP" else served.__module__.startswith("gtp.megatron"), entry.name
    for (_, name), value in bound().items():
        assert value == getattr(api, name)
    assert [m.__wrapped__ for m in wrapped_methods()] == methods_before
    gtp.megatron.uninstall()
    assert dict(vars(api)) == before
    assert bound() == bound_before
    assert wrapped_methods() == methods_before
    assert api.HAVE_GTP is False


def test_a_module_imported_after_install_is_restored_too(api: ModuleType):
    name = "megatron.core.transformer.cuda_graphs"
    original = importlib.import_module(name)
    gtp.megatron.install()
    del sys.modules[name]
    try:
        late = importlib.import_module(name)
        assert late.HAVE_GTP is True
        assert late.GTPChain is api.GTPChain
        gtp.megatron.uninstall()
        assert late.HAVE_GTP is False
        assert late.GTPChain is None
    finally:
        sys.modules[name] = original


def test_installing_twice_keeps_the_first(api: ModuleType):
    gtp.megatron.install(gtp.GTPConfig(alignment=8))
    first = gtp.megatron.installation()
    gtp.megatron.install(gtp.GTPConfig(alignment=8))
    assert gtp.megatron.installation() is first
    with pytest.raises(gtp.GTPStateError, match=r"installed already with .*alignment=8.*uninstall"):
        gtp.megatron.install()


def test_uninstalling_what_is_not_installed(api: ModuleType):
    with pytest.raises(gtp.GTPStateError, match="not installed"):
        gtp.megatron.uninstall()


@pytest.mark.parametrize("version", ["0.18.5", "0.20.0rc1", "1.0.0"])
def test_other_versions_are_refused(api: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str):
    package = importlib.import_module("megatron.core.package_info")
    monkeypatch.setattr(package, "__version__", version)
    with pytest.raises(gtp.UnsupportedError, match=rf"{version}.*>= 0\.19 and < 0\.20"):
        gtp.megatron.install()
    monkeypatch.undo()
    assert gtp.megatron.installation() is None


@pytest.mark.parametrize(
    "setting",
    [{"param_dtype": torch.bfloat16}, {"grad_dtype": torch.float32}, {"grad_reduce": "sum"}, {"min_numel": 9}],
)
def test_settings_that_megatron_decides_are_refused(api: ModuleType, setting: dict[str, Any]):
    (name,) = setting
    with pytest.raises(gtp.GTPValueError, match=rf"GTPConfig\.{name} must stay"):
        gtp.megatron.install(gtp.GTPConfig(**setting))
    assert gtp.megatron.installation() is None


def test_what_is_not_a_config_is_refused(api: ModuleType):
    with pytest.raises(gtp.GTPValueError, match="must be a GTPConfig, got dict"):
        gtp.megatron.install({"alignment": 8})  # type: ignore[arg-type]


def test_fp8_is_refused_when_the_training_loop_announces_it(api: ModuleType):
    gtp.megatron.install()
    api.configure_gtp_remat_from_recipe(fp4=False, fp8_recipe=None, fp8=False, calculate_per_token_loss=True)
    with pytest.raises(gtp.UnsupportedError, match=r"fp8='recipe mxfp8' .*Train in bf16"):
        api.configure_gtp_remat_from_recipe(fp4=False, fp8_recipe="mxfp8", fp8=True, calculate_per_token_loss=False)
    with pytest.raises(gtp.UnsupportedError, match="fp4=True"):
        api.configure_gtp_remat_from_recipe(fp4=True, fp8_recipe=None, fp8=False, calculate_per_token_loss=False)


def test_cuda_graphs_are_refused_when_the_training_loop_announces_them(api: ModuleType):
    gtp.megatron.install()
    settings: dict[str, Any] = {"cuda_graph_modules": None, "moe_shared_expert_overlap": False}
    api.classify_gtp_remat_chains([], cuda_graph_impl="none", **settings)
    with pytest.raises(gtp.UnsupportedError, match="cuda_graph_impl='local'"):
        api.classify_gtp_remat_chains([], cuda_graph_impl="local", **settings)


def test_is_gtp_param_answers_for_any_object(api: ModuleType):
    gtp.megatron.install()
    assert [api.is_gtp_param(x) for x in (None, 3, torch.zeros(1), torch.nn.Parameter(torch.zeros(1)))] == [False] * 4


@pytest.fixture
def two_pretended_ranks() -> Iterator[None]:
    """Megatron's groups for GTP over two ranks, of which only this one exists: enough to build a layer."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        parallel_state.initialize_model_parallel(gtp_remat_size=2, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def what_a_user_sees() -> dict[str, str]:
    """Of the flag: in megatron-core, where a layer is built and used, and from Megatron's training loop."""
    from megatron.core.tensor_parallel import gtp_api
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.training import initialize

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_parallel_num_weight_shards=2,
        use_cpu_initialization=True,
    )  # fmt: skip
    layer = ColumnParallelLinear(8, 12, config=config, init_method=torch.nn.init.zeros_, bias=False)
    arguments = SimpleNamespace(gtp_weight_remat_size=2, expert_gtp_weight_remat_size=1)
    with (
        mock.patch.object(initialize, "get_args", return_value=arguments),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(initialize.mpu, "model_parallel_is_initialized", return_value=False),
    ):
        training = outcome(lambda: initialize._initialize_distributed(None, None, None))
    kind = type(layer.weight)
    return {
        "HAVE_GTP": str(gtp_api.HAVE_GTP),
        "weight": f"{kind.__module__}.{kind.__name__} {tuple(layer.weight.shape)}",
        "used": outcome(lambda: layer(torch.zeros(1, 1, 8))),
        "training": training,
    }


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the text is the result
        return f"{type(error).__name__}: {error}"
    return "works"


def test_the_flag_without_gtp_and_without_te_is_answered_by_megatron(api: ModuleType, two_pretended_ranks: None):
    """megatron-core itself says nothing: it builds weights of its own, which fail when used. Its training loop says
    what is missing. Neither is gtp's to change, before `install` and after `uninstall`."""
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Megatron's own implementation works with Transformer Engine, which is installed")
    before = what_a_user_sees()
    assert before["HAVE_GTP"] == "False"
    assert before["weight"].startswith("megatron.core.tensor_parallel.generalized_tensor_parallelism.GTPShardedParam")
    assert before["used"] != "works"
    assert before["training"].startswith("AssertionError: GTP requires TransformerEngine >= 2.19")
    gtp.megatron.install()
    during = what_a_user_sees()
    assert during["weight"] == "gtp.megatron.weight.MegatronGTPWeight (6, 8)"
    assert "GTP requires" not in during["training"]  # it goes on, to arguments that are not here
    gtp.megatron.uninstall()
    assert what_a_user_sees() == before


@pytest.mark.process(
    "-c",
    "import sys, gtp, gtp.megatron; print(sorted(name for name in sys.modules if name.startswith('megatron')))",
)
def test_importing_gtp_megatron_imports_no_megatron(process: Ended):
    """So what Megatron does before `install` is what it does without gtp."""
    assert process.stdout.strip() == "[]"


def test_an_install_that_fails_leaves_megatron_as_it_was(api: ModuleType, monkeypatch: pytest.MonkeyPatch):
    importlib.import_module("megatron.core.transformer.cuda_graphs")
    methods_before, before, bound_before = wrapped_methods(), dict(vars(api)), bound()
    monkeypatch.delattr("megatron.core.optimizer.emerging_optimizers.TensorParallelMuon.orthogonalize")
    with pytest.raises(KeyError, match="orthogonalize"):
        gtp.megatron.install()
    monkeypatch.undo()
    assert gtp.megatron.installation() is None
    assert dict(vars(api)) == before
    assert bound() == bound_before
    assert wrapped_methods() == methods_before
    gtp.megatron.install()
