"""No phrase in docstrings, comments, messages and pages makes a reader stop."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("pipelines", "models", "estimators", "extras", "jobs")
FOLDERS = (*ROOMS, "examples", "scripts", "notebooks", "docs", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")

# Every edit of this script rebuilds the environments: reword it with its next change.
LEFT = ROOT / "scripts" / "setup_environment.py"

# Phrase -> what to write instead.
BANNED = {
    r"anew": "again",
    r"at hand": "available",
    r"beside": "besides, next to, in addition to",
    r"chunks? of time": "sequence chunks",
    r"(?:go|goes|going|went) on": "continue, resume",
    r"let go": "released",
    r"(?:is|are|was|were|be) asked": "a verb with a subject",
    r"taken for": "treated as, mistaken for",
    r"the (?:former|latter)": "the noun",
    r"those who": "the noun",
    r"(?<!\.)told": "logged, notified, reported",
    r"under way": "in progress",
}
PATTERN = re.compile(r"\b(?:" + "|".join(BANNED) + r")\b", re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of a page's prose, or of a module's comments and long strings.

    Of tests, whose strings are also programs and expected messages, only docstrings count.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = re.compile(r"```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL)
        prose = blank.sub(lambda match: "\n" * match[0].count("\n"), source)
        yield from enumerate(prose.splitlines(), 1)
        return
    tree = ast.parse(source)
    if ROOT / "tests" in path.parents:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = [(1, ast.get_docstring(n) or "") for n in ast.walk(tree) if isinstance(n, documented)]
    else:
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
        strings = [(n.lineno, n.value) for n in constants if isinstance(n.value, str)]
    for number, value in strings:
        if len(value.split()) > 3:
            yield from enumerate(re.sub(r"`[^`]*`", "", value).splitlines(), number)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def replacement(phrase: str) -> str:
    return next(instead for banned, instead in BANNED.items() if re.fullmatch(banned, phrase, re.IGNORECASE))


@pytest.mark.parametrize("folder", [*FOLDERS, *PAGES])
def test_no_phrase_makes_a_reader_stop(folder: str) -> None:
    place = ROOT / folder
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.suffix in (".py", ".md")]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; write: {replacement(match[0])}"
        for path in sorted(files)
        if path not in (Path(__file__), LEFT) and PATTERN.search(path.read_text(encoding="utf-8"))
        for line, text in texts(path)
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)
