"""Parses the HTML page of a report: texts, tables, cards and addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})


@dataclass
class Table:
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        return [row[self.header.index(name)] for row in self.rows]

    def row(self, first: str) -> dict[str, str]:
        """Returns the only row that begins with a text, as heading -> cell."""
        (found,) = [row for row in self.rows if row[0] == first]
        return dict(zip(self.header, found, strict=True))


class Page(HTMLParser):
    """A page by its sections.

    Attributes:
        tables: Section -> its tables.
        cards: Name of a figure -> its text.
        text: Section -> all its text.
        tags: Number of start tags by name.
        addresses: Attributes that a browser could load or follow, except links within the page.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[Table]] = {}
        self.cards: dict[str, str] = {}
        self.text: dict[str, str] = {}
        self.tags: dict[str, int] = {}
        self.addresses: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self._card = ["", ""]
        self.feed(html)
        self.close()

    @classmethod
    def at(cls, path: str | Path) -> Page:
        return cls(Path(path).read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            value = values.get(name) or ""
            if value and not value.startswith("#"):
                self.addresses.append(value)
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "section":
            self._section = values.get("id") or ""
            self.tables[self._section], self.text[self._section] = [], ""
        elif tag == "table":
            self.tables[self._section].append(Table())
        elif tag == "tr" and "tbody" in self._open:
            self.tables[self._section][-1].rows.append([])
        elif tag == "th":
            self.tables[self._section][-1].header.append("")
        elif tag == "td":
            self.tables[self._section][-1].rows[-1].append("")
        elif tag == "div" and values.get("class") == "card":
            self._card = ["", ""]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        if tag == "div" and self._card[1]:
            self.cards[self._card[1]] = self._card[0]
            self._card = ["", ""]
        elif tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if not self._open or not self._section:
            return
        self.text[self._section] += data
        if self._open[-1] == "th":
            self.tables[self._section][-1].header[-1] += data
        elif self._open[-1] == "td":
            self.tables[self._section][-1].rows[-1][-1] += data
        elif self._open[-1] == "b":
            self._card[0] += data
        elif self._open[-1] == "span" and "div" in self._open:
            self._card[1] += data
