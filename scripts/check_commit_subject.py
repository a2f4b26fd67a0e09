"""Checks that a commit subject is imperative and has at most 72 characters.

The hook `commit-msg` runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

MOST_CHARACTERS = 72
# A first word with one of these endings describes a change, unless it is in the list of imperatives.
ENDINGS = ("ed", "ing", "s")
IMPERATIVES = frozenset(
    {"address", "bring", "bus", "bypass", "compress", "cross", "discuss", "embed"}
    | {"express", "feed", "focus", "harness", "miss", "need", "pass", "press"}
    | {"proceed", "process", "ring", "seed", "speed", "string", "suppress"}
)
NO_VERBS = frozenset(
    {"a", "an", "bug", "bugfix", "chore:", "docs:", "feat:", "fix:", "minor", "misc"}
    | {"more", "new", "no", "some", "that", "the", "this", "wip"}
)


def problem_of(subject: str) -> str | None:
    """Returns the problem with a subject and the remedy, or None."""
    if len(subject) > MOST_CHARACTERS:
        return f"the subject has {len(subject)} characters; shorten it to {MOST_CHARACTERS}"
    first, *others = subject.split() or [""]
    word = first.lower()
    if not others:
        return f"the subject {subject!r} is too short; say what the commit changes"
    if word in NO_VERBS or (word.endswith(ENDINGS) and word not in IMPERATIVES):
        return f"the subject begins with {first!r}; begin with an imperative, such as 'Add' or 'Fix'"
    if not first[0].isupper():
        return f"the subject begins with {first!r}; write a capital letter first"
    if subject.endswith("."):
        return "the subject ends with a period; leave it out"
    return None


def main() -> None:
    """Reads the file named by the first argument, and exits with 1 if it rejects the subject."""
    subject = Path(sys.argv[1]).read_text(encoding="utf-8").split("\n", 1)[0]
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return
    if problem := problem_of(subject):
        sys.exit(f"commit message: {problem}")


if __name__ == "__main__":
    main()
