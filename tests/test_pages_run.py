"""Every Python block of every page runs or gives a reason."""

import ast
import re
from pathlib import Path
from typing import Any

import page_code
import pytest

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
# tests/test_pages.py runs these two pages and checks their results.
ELSEWHERE = {"finetuning.md", "lightning.md"}
# Number of blocks that cannot run here, by page. Increase a count only on purpose.
NOT_RUN: dict[str, int] = {
    "clusters.md": 1,
    "dataloader.md": 1,
    "inference.md": 1,
    "search.md": 1,
    "serving.md": 2,
    "tracking.md": 1,
}
RUN = [name for name, path in PAGES.items() if any(not b.reason for b in page_code.blocks(path.read_text()))]


def given(name: str, spark: Any, shared: Path) -> dict[str, Any]:
    """Writes the table that the README reads; other pages make their own."""
    if name == "README.md":
        rows = spark.range(4000).selectExpr("rand(1) AS a", "rand(2) AS b", "rand(3) AS c")
        table = rows.selectExpr("*", "cast(a + b > c + 0.5 AS double) AS label")
        table.write.csv(str(shared / "table.csv"), header=True)
    return {"spark": spark}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if name not in ELSEWHERE])
def test_the_code_of_a_page_runs(name: str, spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    page_code.run(PAGES[name], tmp_path, **given(name, spark, tmp_path))


@pytest.mark.parametrize("name", PAGES)
def test_what_is_not_run_says_why_and_is_counted(name: str) -> None:
    text = PAGES[name].read_text()
    blocks = page_code.blocks(text)
    assert len(re.findall(r"^ *(?:```|~~~) *python", text, re.MULTILINE)) == sum(
        not block.hidden for block in blocks
    ), "a Python block that begins otherwise would not be run"
    assert {block.words for block in blocks if not block.reason} <= {""}, "say `python not run: why`"
    for block in blocks:
        ast.parse(block.code)
    assert sum(bool(block.reason) for block in blocks) == NOT_RUN.get(name, 0)


def test_a_block_that_fails_is_told_by_the_page_s_own_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\n\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        page_code.run(page, tmp_path)
    assert raised.traceback[-1].lineno + 1 == 9
