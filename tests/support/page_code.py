"""Extracts and runs the Python code of a page; `run first` comments hold setup that readers do not see."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERN = re.compile(
    r"^```python(?P<words>[^\n]*)\n(?P<code>.*?)^```$|^<!-- run first:\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
NOT_RUN = " not run: "


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: Page line above its first line.
        code: Code of the block.
        words: Text after "python" in the fence.
        hidden: True if readers do not see it.
    """

    line: int
    code: str
    words: str = ""
    hidden: bool = False

    @property
    def reason(self) -> str:
        return self.words.removeprefix(NOT_RUN) if self.words.startswith(NOT_RUN) else ""


def blocks(text: str) -> list[Block]:
    """Returns the Python blocks of a page in order, including hidden blocks."""
    return [
        Block(
            line=text[: match.start()].count("\n") + 1,
            code=match["code"] or match["hidden"] or "",
            words=match["words"] or "",
            hidden=match["hidden"] is not None,
        )
        for match in PATTERN.finditer(text)
    ]


def run(page: Path, folder: Path, **names: Any) -> dict[str, Any]:
    """Runs the page's blocks and returns their names.

    Args:
        page: The Markdown file.
        folder: Replaces `/shared`.
        names: Names that the page expects to exist.
    """
    names["__name__"] = "__main__"  # workers get classes of the page by value, as from a notebook
    for block in blocks(page.read_text()):
        if not block.reason:
            code = block.code.replace("/shared/", f"{folder}/")
            # Empty lines above, so a traceback shows the page's line number.
            exec(compile("\n" * block.line + code, page.name, "exec"), names)
    return names
