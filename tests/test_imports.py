"""The architecture, enforced: rooms import one way, `import gtp` is light, no module carries state between models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tests.source_rules as rules
from tests.processes import Ended

ROOT = Path(__file__).parents[1]


def write(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / "gtp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return rules.modules_of(folder / "gtp")


def test_rooms_import_only_from_rooms_above() -> None:
    modules = rules.modules_of(ROOT / "gtp")
    assert "gtp.errors" in modules
    found = rules.violations(rules.imports_of(modules))
    assert not found, "\n".join(found)


def test_no_module_carries_state() -> None:
    found = rules.mutable_state(rules.modules_of(ROOT / "gtp"))
    assert not found, "\n".join(found)


@pytest.mark.process(
    "-c",
    "import sys, torch, torch.distributed, typing_extensions\n"
    "before = set(sys.modules)\n"
    "import gtp\n"
    "print(*sorted(set(sys.modules) - before))\n",
)
def test_import_gtp_loads_nothing_but_torch(process: Ended) -> None:
    """No extra (Megatron, Triton, matplotlib, ...) beyond what torch itself loads, nor Dynamo, which is slow."""
    new = process.stdout.split()
    assert "gtp.config" in new
    foreign = [m for m in new if m.split(".")[0] not in {"gtp", "torch", *sys.stdlib_module_names}]
    assert foreign == []
    assert "torch._dynamo" not in new


# --- the rules themselves, on made-up sources


def test_wrong_way_import_is_named_with_its_chain(tmp_path: Path) -> None:
    modules = write(
        tmp_path,
        {
            "__init__.py": "",
            "ops/__init__.py": "from gtp.ops.linear import linear",
            "ops/linear.py": "import torch\nfrom gtp.weights import layout\n",
            "runtime/lease.py": "from gtp.ops.linear import linear\n",
            "weights/layout.py": "import gtp.runtime.lease\n",
        },
    )
    assert rules.violations(rules.imports_of(modules)) == [
        "gtp.ops.linear (linear.py:2) imports gtp.weights.layout: ops may import errors, config, protocol; "
        "it closes the chain gtp.ops.linear -> gtp.weights.layout -> gtp.runtime.lease -> gtp.ops.linear"
    ]


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("def f():\n    from gtp.weights import layout\n", True),
        ("from ..weights import layout\n", True),
        ("from ..weights.layout import rows\n", True),
        ("import gtp\n", True),
        ("from gtp import shard_model\n", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gtp.weights import layout\n", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import gtp.weights.layout\n", True),
        ("from gtp.errors import GTPError\nfrom . import norm\nimport gtpx.weights\n", False),
    ],
)
def test_which_imports_count(tmp_path: Path, source: str, wrong: bool) -> None:
    modules = write(
        tmp_path,
        {"__init__.py": "", "errors.py": "", "weights/layout.py": "", "ops/norm.py": "", "ops/linear.py": source},
    )
    assert bool(rules.violations(rules.imports_of(modules))) is wrong


def test_new_room_needs_a_place(tmp_path: Path) -> None:
    modules = write(tmp_path, {"__init__.py": "", "errors.py": "", "attic/box.py": "import gtp.errors"})
    assert rules.violations(rules.imports_of(modules)) == [
        "gtp.attic.box: no room 'attic' in ROOMS; give it a place in the order"
    ]


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("_CACHE = {}\n", True),
        ("_CACHE: dict[str, int] = {}\n", True),
        ("seen = []\n", True),
        ("streams = {n: n for n in range(3)}\n", True),
        ("counter = itertools.count()\n", True),
        ("if True:\n    registry = set()\n", True),
        ("def f():\n    global x\n    x = 1\n", True),
        ("@functools.cache\ndef f(): ...\n", True),
        ("@lru_cache(maxsize=3)\ndef f(): ...\n", True),
        ("class A:\n    live = []\n", True),
        ("class A:\n    live: ClassVar[dict[str, int]] = defaultdict(int)\n", True),
        ("__all__ = ['f']\n", False),
        ("KINDS = ('a', 'b')\n", False),
        ("NAMES = frozenset(['a'])\n", False),
        ("LOG: Final = logging.getLogger(__name__)\n", False),
        ("Name = Literal['a', 'b']\nLIMIT = 3\n", False),
        ("class A:\n    members: list[int] = field(default_factory=list)\n", False),
        ("def f():\n    x = []\n    return x\n", False),
    ],
)
def test_what_counts_as_state(tmp_path: Path, source: str, wrong: bool) -> None:
    assert bool(rules.mutable_state(write(tmp_path, {"x.py": source}))) is wrong
