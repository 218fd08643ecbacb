"""`install` and `uninstall`: gtp behind Megatron-Core's flag `tensor_parallel_num_weight_shards`.

Megatron calls everything GTP-specific through the module `megatron.core.tensor_parallel.gtp_api`, imported where it is
used. Installing replaces that module's attributes, and the copies that a few modules took when they were imported; it
stands before the functions of `gtp.megatron.surface.WRAPPED`, and looks at the layers that models are built from
(`gtp.megatron.foreign`). What is installed belongs to the process and knows no model; each model's state hangs off its
own runtime (see `gtp.megatron.building`).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, get_args

from torch.utils.hooks import RemovableHandle

from gtp.config import GTPConfig
from gtp.errors import GTPStateError, GTPValueError, MissingExtraError, UnsupportedError
from gtp.megatron import checkpoint, foreign, frozen, refusals, replicated, saved_tensors, tp_linear, whole_matrix
from gtp.megatron.api import names_behind_the_flag
from gtp.megatron.surface import API, BOUND_AT_IMPORT, WRAPPED, WRAPPED_METHODS
from gtp.ops.collective_backends import BackendName

SUPPORTED: Final = ((0, 19), (0, 20))
"""megatron-core versions from the first, below the second; 0.19.0 and 0.19.2 were tested."""

_API: Final = "megatron.core.tensor_parallel.gtp_api"
_INSTALLED: Final = "gtp_installation"  # the attribute of Megatron's module that remembers what was there before
_ABSENT: Final = object()


@dataclasses.dataclass(frozen=True)
class Installation:
    """What is installed, and what to put back.

    Attributes:
        config: Settings of the runtimes that models get.
        tp_gemm_backend: How tensor-parallel linears move activations; None: as Megatron does.
        replaced: `(module name, attribute, value before)` in order of replacement.
        watch: Removes the check of layers that become part of a model.
    """

    config: GTPConfig
    tp_gemm_backend: BackendName | None
    replaced: tuple[tuple[str, str, Any], ...]
    watch: RemovableHandle


def install(config: GTPConfig | None = None, *, tp_gemm_backend: BackendName | None = None) -> None:
    """Puts gtp behind Megatron-Core's flag, for every model built afterwards in this process.

    Then `TransformerConfig(tensor_parallel_num_weight_shards=...)` with `initialize_model_parallel(gtp_remat_size=...)`
    builds models whose weights gtp shards, with the local layer specs and, where it is installed, Transformer Engine's.

    Args:
        config: Settings of each model's runtime. `grad_reduce` follows the model's `calculate_per_token_loss`.
        tp_gemm_backend: With it, the local spec's column- and row-parallel linears run collective GEMMs under sequence
            parallelism: `"collective"`, `"symm_mem"`, `"copy_engine"` or `"auto"`, see `gtp.ops.gemm_backend`.

    Raises:
        MissingExtraError: megatron-core is not installed.
        UnsupportedError: its version is outside the supported range.
        GTPValueError: a setting that Megatron decides itself, or an unknown backend.
        GTPStateError: installed already with other settings.
    """
    config = GTPConfig() if config is None else config
    _check_config(config)
    if tp_gemm_backend not in (None, *get_args(BackendName)):
        raise GTPValueError(
            f"tp_gemm_backend must be None or one of {', '.join(map(repr, get_args(BackendName)))}, got "
            f"{tp_gemm_backend!r}"
        )
    api = _import_api()
    before = installation(api)
    if before is not None:
        if (before.config, before.tp_gemm_backend) != (config, tp_gemm_backend):
            raise GTPStateError(
                f"gtp.megatron is installed already with {before.config}, tp_gemm_backend={before.tp_gemm_backend!r}: "
                f"call gtp.megatron.uninstall() before installing with {config}, tp_gemm_backend={tp_gemm_backend!r}"
            )
        return
    for holder in (*WRAPPED, *WRAPPED_METHODS):
        importlib.import_module(holder.module)  # now, while names that it binds at import are still Megatron's
    # all is looked up before anything is replaced: what is missing leaves Megatron as it was
    planned = _replacements(api, config, tp_gemm_backend)
    replaced = tuple(_replace(*each) for each in planned)
    setattr(api, _INSTALLED, Installation(config, tp_gemm_backend, replaced, foreign.watch()))


def _replacements(
    api: ModuleType, config: GTPConfig, tp_gemm_backend: BackendName | None
) -> list[tuple[ModuleType, str, Any]]:
    """Module, name (or `Class.method`) and what `install` puts there."""
    names = names_behind_the_flag(config)
    planned: list[tuple[ModuleType, str, Any]] = [(api, entry.name, names[entry.name]) for entry in API]
    for bound in BOUND_AT_IMPORT:
        module = sys.modules.get(bound.module)
        if module is not None:
            planned += [(module, name, names[name]) for name in bound.names]
    wrappers: dict[str, Callable[[Any], Any]] = {}
    for room in (checkpoint, frozen, refusals, saved_tensors, whole_matrix):
        wrappers |= room.WRAPPERS
    for entry in WRAPPED:
        defined_in = sys.modules[entry.module]
        wrapped = wrappers[entry.name](getattr(defined_in, entry.name))
        holders = [defined_in, *(sys.modules[name] for name in entry.copied_by if name in sys.modules)]
        planned += [(holder, entry.name, wrapped) for holder in holders]
    methods = {(method.module, method.name) for method in WRAPPED_METHODS}
    method_wrappers: dict[str, Callable[[Any], Any]] = {}
    for room in (checkpoint, refusals, replicated, whole_matrix):
        method_wrappers |= room.METHOD_WRAPPERS
    if tp_gemm_backend is not None:
        own = tp_linear.method_wrappers(tp_gemm_backend)
        method_wrappers |= own
        methods |= {(tp_linear.MODULE, name) for name in own}
    for module_name, name in sorted(methods):
        holder, attribute = _holder(sys.modules[module_name], name)
        planned.append((sys.modules[module_name], name, method_wrappers[name](vars(holder)[attribute])))
    return planned


def uninstall() -> None:
    """Restores Megatron-Core as it was. Models that gtp shards are to be gone by then: Megatron no longer knows them.

    Raises:
        GTPStateError: gtp is not installed.
    """
    api = _import_api()
    installed = installation(api)
    if installed is None:
        raise GTPStateError("gtp.megatron is not installed: call gtp.megatron.install() first")
    before = {name: value for module, name, value in installed.replaced if module == _API}
    restored = {(module, name) for module, name, _ in installed.replaced}
    for entry in WRAPPED:
        # imported after install, so it copied ours
        ours = getattr(sys.modules[entry.module], entry.name)
        for module_name in entry.copied_by:
            module = sys.modules.get(module_name)
            if module is not None and getattr(module, entry.name) is ours:
                _put(module, entry.name, ours.__wrapped__)
    for module_name, name, value in reversed(installed.replaced):
        _put(sys.modules[module_name], name, value)
    for bound in BOUND_AT_IMPORT:
        module = sys.modules.get(bound.module)
        for name in bound.names if module is not None else ():
            # imported after install, so it bound ours
            if (bound.module, name) not in restored and module is not None:
                _put(module, name, before[name] if before["HAVE_GTP"] or name == "HAVE_GTP" else None)
    installed.watch.remove()
    delattr(api, _INSTALLED)


def installation(api: ModuleType | None = None) -> Installation | None:
    """What `install` put in place, or None."""
    return getattr(api if api is not None else _import_api(), _INSTALLED, None)


def _import_api() -> ModuleType:
    try:
        package = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise MissingExtraError(
            "gtp.megatron needs megatron-core, gtp's extra 'megatron': pip install 'megatron-core>=0.19,<0.20'"
        ) from error
    version = str(package.__version__)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, last = SUPPORTED
    if not first <= found < last:
        raise UnsupportedError(
            f"megatron-core {version}: gtp knows the internal names of versions >= {'.'.join(map(str, first))} and < "
            f"{'.'.join(map(str, last))}. Install one of these, or a gtp that supports yours"
        )
    return importlib.import_module(_API)


def _check_config(config: GTPConfig) -> None:
    if not isinstance(config, GTPConfig):
        raise GTPValueError(f"config must be a GTPConfig, got {type(config).__name__}: write gtp.GTPConfig(...)")
    fixed = {
        "param_dtype": (None, "Megatron's own bf16=True or fp16=True makes low-precision weights"),
        "grad_dtype": (None, "DistributedDataParallelConfig(grad_reduce_in_fp32=...) decides the dtype of gradients"),
        "grad_reduce": ("mean", "it follows each model's calculate_per_token_loss"),
        "min_numel": (0, "Megatron decides which weights are sharded"),
    }
    for name, (value, why) in fixed.items():
        if getattr(config, name) != value:
            raise GTPValueError(
                f"gtp.megatron: GTPConfig.{name} must stay {value!r}, got {getattr(config, name)!r}, because {why}"
            )


def _replace(module: ModuleType, name: str, value: Any) -> tuple[str, str, Any]:
    before = _get(module, name)
    _put(module, name, value)
    return module.__name__, name, before


def _get(module: ModuleType, name: str) -> Any:
    holder, attribute = _holder(module, name)
    return getattr(holder, attribute, _ABSENT)


def _put(module: ModuleType, name: str, value: Any) -> None:
    holder, attribute = _holder(module, name)
    if value is _ABSENT:
        delattr(holder, attribute)
    else:
        setattr(holder, attribute, value)


def _holder(module: ModuleType, name: str) -> tuple[Any, str]:
    """The module for a plain name, its class for `Class.method`."""
    owner, _, attribute = name.rpartition(".")
    return (getattr(module, owner) if owner else module), attribute
