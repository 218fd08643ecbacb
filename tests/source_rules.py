"""Reads the source of gtp without importing it: which module imports which, and what lives at module level.

The order of rooms, the folders of gtp/, is the architecture: a room imports only from rooms before it in `ROOMS`.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOMS = (
    "errors",
    "config",
    "protocol",
    "ops",
    "modules",
    "runtime",
    "weights",
    "checkpoint",
    "optim",
    "gtp",  # the package itself, which re-exports what is above
    "megatron",
    "transformer_engine",
    "testing",
    "plan",
    "cli",
)

_CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_CONTAINER_CALLS = {
    "dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "count",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "ContextVar", "local",
}  # fmt: skip
# what these return cannot change, or (loggers) is the process's own affair
_CONSTANT_CALLS = {"frozenset", "tuple", "device", "getLogger", "NewType", "ParamSpec", "timedelta", "TypeVar"}
_CACHES = {"cache", "lru_cache"}


@dataclasses.dataclass(frozen=True)
class Import:
    """`source` imports the module `target` of the same package."""

    source: str
    target: str
    where: str


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name to file, of every module of the package in this folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """ "ops" for gtp.ops.linear; "gtp" for the package itself."""
    return module.split(".")[1] if "." in module else module


def imports_of(modules: dict[str, Path]) -> list[Import]:
    """Every import between these modules, in functions too, but not under `if TYPE_CHECKING`."""
    found = []
    for module, path in modules.items():
        for node in _runtime_nodes(ast.parse(path.read_text())):
            for target in _targets(node, module, path.name == "__init__.py", modules):
                if target != module:
                    line = getattr(node, "lineno", 0)
                    found.append(Import(module, target, f"{path.name}:{line}"))
    return found


def violations(imports: list[Import]) -> list[str]:
    """One text per import that points the wrong way, with the chain that it closes when there is one."""
    order = {room: i for i, room in enumerate(ROOMS)}
    texts = []
    for i in imports:
        source, target = room_of(i.source), room_of(i.target)
        for module, room in ((i.source, source), (i.target, target)):
            if room not in order:
                texts.append(f"{module}: no room {room!r} in ROOMS; give it a place in the order")
        if source == target or source not in order or target not in order or order[target] < order[source]:
            continue
        chain = _chain(i, imports)
        closes = f"; it closes the chain {' -> '.join(chain)}" if chain else ""
        allowed = ", ".join(ROOMS[: order[source]])
        texts.append(f"{i.source} ({i.where}) imports {i.target}: {source} may import {allowed}{closes}")
    return sorted(set(texts))


def mutable_state(modules: dict[str, Path]) -> list[str]:
    """One text per module-level or class-level name that could carry state from one model to another."""
    texts = []
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                texts.append(f"{module}:{node.lineno} global {', '.join(node.names)}: state belongs to an object")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                texts += [
                    f"{module}:{node.lineno} {node.name} is cached for the whole process: keep results on an object"
                    for decorator in node.decorator_list
                    if _name(decorator) in _CACHES
                ]
        texts += [f"{module}:{text}" for text in _assigned_state(tree.body, calls=True)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                texts += [f"{module}:{text}" for text in _assigned_state(node.body, calls=False)]
    return texts


def _assigned_state(body: list[ast.stmt], *, calls: bool) -> Iterator[str]:
    """`calls`: whether the result of any call counts, or only that of a known container."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _assigned_state([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)], calls=calls)
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [ast.unparse(t) for t in targets]
        # __all__, and what ctypes demands of its structures
        if all((n.startswith("__") and n.endswith("__")) or n == "_fields_" for n in names):
            continue
        if isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation):
            continue
        value = node.value
        if isinstance(value, ast.Call) and _name(value) == "cast":
            value = value.args[-1]
        mutable = isinstance(value, _CONTAINERS) or (
            isinstance(value, ast.Call)
            and (_name(value) not in _CONSTANT_CALLS if calls else _name(value) in _CONTAINER_CALLS)
        )
        if mutable:
            text = f"{', '.join(names)} = {ast.unparse(value)[:60]}"
            yield f"{node.lineno} {text}: make it a tuple, annotate it Final, or give it to an object"


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from _runtime_nodes(other)
            continue
        yield node
        yield from _runtime_nodes(node)


def _targets(node: ast.AST, module: str, is_package: bool, modules: dict[str, Path]) -> Iterator[str]:
    package = module.split(".")[0]
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, base] if base else parts)
        # `from gtp.ops import linear` may name a module or something in gtp/ops/__init__.py
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
    else:
        return
    yield from (name for name in names if name.split(".")[0] == package)


def _chain(broken: Import, imports: list[Import]) -> list[str]:
    """The way from the imported module back to the room that imports it, if there is one."""
    edges = collections.defaultdict(list)
    for i in imports:
        edges[i.source].append(i.target)
    queue = collections.deque([[broken.source, broken.target]])
    seen = {broken.target}
    while queue:
        path = queue.popleft()
        for target in edges[path[-1]]:
            if room_of(target) == room_of(broken.source):
                return [*path, target]
            if target not in seen:
                seen.add(target)
                queue.append([*path, target])
    return []


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
