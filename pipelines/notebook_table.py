"""Makes the table that a notebook shows of an object: HTML of bounded length, every text of it escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MOST_ROWS = 50
MOST_LETTERS = 200


def notebook_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = ""
) -> str:
    """Returns the HTML of a table, for a `_repr_html_`; rows beyond `MOST_ROWS` are counted, not shown."""
    body = "".join(_row(map(str, row), "td") for row in rows[:MOST_ROWS])
    more = len(rows) - MOST_ROWS
    notes = [note, f"{more:,} more are not shown." if more > 0 else ""]
    told = escape(" ".join(filter(None, notes)))
    return (
        f"<div><b>{escape(title)}</b><table><thead>{_row(header, 'th')}</thead><tbody>{body}</tbody></table>"
        + (f"<div>{told}</div>" if told else "")
        + "</div>"
    )


def _row(cells: Sequence[str] | map[str], tag: str) -> str:
    shown = (cell if len(cell) <= MOST_LETTERS else f"{cell[: MOST_LETTERS - 3]}..." for cell in cells)
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(c)}</{tag}>' for c in shown) + "</tr>"
