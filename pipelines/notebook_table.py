"""Shows an object as an HTML table in notebooks; limits the number of rows and escapes all text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MOST_ROWS = 50
MOST_LETTERS = 200


def notebook_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = ""
) -> str:
    """Returns a table as HTML, for a `_repr_html_`.

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
