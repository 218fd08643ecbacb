"""What the documentation shows, runs: Python blocks marked `run`, and files that the README includes, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import Ended

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"<!-- (?P<mark>run|file: (?P<file>\S+)) -->\n```python\n(?P<code>.*?)```", re.DOTALL)


def blocks(mark):
    return [
        pytest.param(match, id=f"{page.name}:{match['file'] or match.start()}")
        for page in PAGES
        for match in _BLOCK.finditer(page.read_text())
        if match["mark"].startswith(mark)
    ]


@pytest.mark.parametrize("block", blocks("file"))
def test_a_shown_file_is_the_file(block):
    source = (ROOT / block["file"]).read_text()
    assert block["code"].strip() in source, f"{block['file']} is not what the page shows"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(*shown.values, id=shown.id, marks=pytest.mark.process("-c", shown.values[0]["code"]))
        for shown in blocks("run")
    ],
)
def test_a_shown_snippet_runs(block, process: Ended):
    assert process.code == 0, block["code"]


def test_every_link_to_a_file_leads_to_one():
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []
