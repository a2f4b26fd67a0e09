"""Writes the results as one page of Markdown, and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from check.runner import CaseResult, PartResult


def write(path: Path, results: Sequence[PartResult], *, command: str, began: str, seconds: float) -> None:
    """Writes the page `path`, and the same results as JSON next to it. Replaces each file atomically."""
    parts = [asdict(result) | {"state": result.state} for result in results]
    whole = {"command": command, "began": began, "seconds": round(seconds, 1), "parts": parts}
    _replace(path.with_suffix(".json"), json.dumps(whole, indent=1) + "\n")
    _replace(path, make_page(results, command=command, began=began, seconds=seconds))


def make_page(results: Sequence[PartResult], *, command: str, began: str, seconds: float) -> str:
    """Returns the page: what ran in how many seconds, then a table per part."""
    lines = [
        "# GPU check",
        "",
        f"`{command}`, {began}, {seconds:.0f} s.",
        "",
        "The sizes are tiny, so the times mean nothing."
        if any(result.is_tiny for result in results)
        else "Times are medians of 5 interleaved rounds.",
        "",
        *_table(
            ("part", "state", "s", "result"),
            [(r.name, r.state, f"{r.seconds:.0f}", r.summary()) for r in results],
        ),
    ]
    for result in results:
        lines += ["", f"## {result.title}", ""]
        if result.note:
            lines += [result.note, ""]
        if result.reason:
            lines += [f"{result.state}: {result.reason}", ""]
        if result.cases:
            header = ("case", *result.columns)
            lines += _table(header, [_row(case, len(result.columns)) for case in result.cases])
        if result.log:
            lines += ["", "The last lines of the log:", "", *(f"    {line[:200]}" for line in result.log)]
    return "\n".join(lines).rstrip() + "\n"


def _row(case: CaseResult, width: int) -> Sequence[str]:
    if case.state == "ok":
        return [case.case, *map(show, case.values)]
    return [case.case, f"{case.state}: {case.reason}", *[""] * (width - 1)]


def show(value: Any) -> str:
    """Returns a figure with three significant digits; large numbers are whole."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value) if isinstance(value, str) else f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1e}" if value and abs(value) < 0.001 else f"{value:.3g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    # A line break or a bar would end the cell.
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
