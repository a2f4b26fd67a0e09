"""Shows an object as a table: as aligned text, or in notebooks as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MOST_ROWS = 50
MOST_LETTERS = 200


def align_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 0) -> str:
    """Returns lines of text; the first `num_left` columns are left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    forms = [f"{{:{'<' if n < num_left else '>'}{width}}}" for n, width in enumerate(widths)]
    return "\n".join("  ".join(forms).format(*line).rstrip() for line in lines)


def notebook_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = ""
) -> str:
    """Returns a table as HTML, for a `_repr_html_`, and escapes all text.

    Shows the first `MOST_ROWS` rows, and then the number of the remaining rows.
    """
    body = "".join(_row(map(str, row), "td") for row in rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    notes = [note, f"{more:,} more are not shown." if more > 0 else ""]
    text = escape(" ".join(filter(None, notes)))
    head = f"<b>{escape(title)}</b><table><thead>{_row(header, 'th')}</thead>"
    return f"<div>{head}<tbody>{body}</tbody></table>{f'<div>{text}</div>' if text else ''}</div>"


def _row(cells: Sequence[str] | map[str], tag: str) -> str:
    shown = (cell if len(cell) <= MOST_LETTERS else f"{cell[: MOST_LETTERS - 3]}..." for cell in cells)
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(c)}</{tag}>' for c in shown) + "</tr>"
