"""The table of what Megatron-Core touches (gtp/megatron/surface.py) against the installed sources, row by row.

Reads files only. A Megatron that renames, drops or adds a name fails here, with the name.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from gtp.megatron import MegatronGTPWeight
from gtp.megatron.surface import (
    API,
    BOUND_AT_IMPORT,
    WEIGHT,
    WRAPPED_METHODS,
    ApiName,
    BoundAtImport,
    Touched,
    WrappedMethod,
)

GTP_API = "megatron.core.tensor_parallel.gtp_api"


@functools.cache
def megatron() -> Path:
    """The folder that holds `core` and `training`."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


@functools.cache
def imports_of_gtp_api() -> dict[str, set[tuple[str, bool]]]:
    """File -> (name, whether at import time) of every import from `gtp_api` in Megatron."""
    found: dict[str, set[tuple[str, bool]]] = {}
    for path in megatron().rglob("*.py"):
        text = path.read_text()
        if GTP_API not in text or path.name in ("gtp_api.py", "generalized_tensor_parallelism.py"):
            continue
        tree = ast.parse(text)
        in_functions = {
            node
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == GTP_API:
                file = path.relative_to(megatron()).as_posix()
                found.setdefault(file, set()).update((a.name, node not in in_functions) for a in node.names)
    return found


def test_every_import_of_megatron_is_in_the_table():
    imported = {(file, name) for file, names in imports_of_gtp_api().items() for name, _ in names}
    listed = {(file, entry.name) for entry in API for file in entry.imported_in}
    assert imported - listed == set()
    assert listed - imported == set()


def test_every_name_bound_at_import_is_in_the_table():
    bound = {(file, name) for file, names in imports_of_gtp_api().items() for name, at_import in names if at_import}
    listed = {
        (entry.module.removeprefix("megatron.").replace(".", "/") + ".py", name)
        for entry in BOUND_AT_IMPORT
        for name in entry.names
    }
    assert bound == listed


@pytest.mark.parametrize("entry", API, ids=lambda entry: entry.name)
def test_megatron_defines_the_name(entry: ApiName):
    text = (megatron() / "core/tensor_parallel/gtp_api.py").read_text()
    assert re.search(rf"\b{entry.name}\b", text)
    assert entry.contract


@pytest.mark.parametrize("entry", BOUND_AT_IMPORT, ids=lambda entry: entry.module)
def test_the_binding_module_exists(entry: BoundAtImport):
    assert (megatron().parent / (entry.module.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize("entry", WRAPPED_METHODS, ids=lambda entry: entry.name)
def test_the_wrapped_method_exists(entry: WrappedMethod):
    owner, method = entry.name.split(".")
    tree = ast.parse((megatron().parent / (entry.module.replace(".", "/") + ".py")).read_text())
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    assert method in {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", WEIGHT, ids=lambda row: row.name)
def test_megatron_touches_the_attribute(row: Touched):
    for file in row.files:
        assert re.search(rf"\b{row.name}\b", (megatron() / file).read_text()), f"{file} no longer knows {row.name}"
    assert hasattr(MegatronGTPWeight, row.name) == (row.served == "class")
