"""Writes docs/pairs.md, the table of all pairs of settings: `python tests/pairs/pairs_page.py`."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from pathlib import Path

from covering import Value
from setting_choices import GROUPS, params_of
from setting_pairs import MEANINGLESS, NAMES, PAIRS, REFUSED, Rule, beside, fits, rule_of, status

from ringspark.estimators import TorchClassifier
from ringspark.estimators.stages.to_config import config_of

PAGE = Path(__file__).parents[2] / "docs" / "pairs.md"


def page() -> str:
    """Returns the page as Markdown."""
    states = {pair: status(frozenset(pair)) for pair in PAIRS}
    counts = Counter(states.values())
    num_fits = len(fits()[0])
    equal = sum(choice.promise != "learns" for choices in GROUPS.values() for choice in choices)
    lines = [
        "# Pairs of settings",
        "",
        "Printed by `python tests/pairs/pairs_page.py` from the table that `tests/pairs` tests.",
        "",
        f"The {sum(map(len, NAMES.values()))} choices below form {len(PAIRS):,} pairs of different groups. "
        f"{counts['works']:,} pairs work, {counts['refused']:,} are refused in one sentence before Spark starts a "
        f"job, {counts['meaningless']:,} have no meaning, and none is unknown.",
        "",
        f"`make test-all` trains a tiny table in {num_fits} Spark fits, which together contain every working pair. "
        f"{equal} of the choices promise equal weights: a fit of only these choices ends with the weights of one "
        "worker without the choices of the rows *equal*, within 1e-5. With any other choice, the loss must fall. "
        "`make test` runs a sample, which changes every day, and all refusals.",
        "",
        "## Choices",
        "",
        "The first choice of a group is its default. *Equal*: does not change the weights. *Kept*: the plain "
        "training has the choice too. *Learns*: changes the training, so only the loss is checked.",
        "",
        "| group | equal | kept | learns |",
        "| --- | --- | --- | --- |",
    ]
    for group, choices in GROUPS.items():
        cells = [
            ", ".join(c.name for c in choices if c.promise == kind) for kind in ("equal", "kept", "learns")
        ]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Pairs of groups",
        "",
        "Refused pairs of each pair of groups, of all its pairs. All pairs of other groups work.",
        "",
        "| groups | refused or without meaning | of |",
        "| --- | --- | --- |",
    ]
    for left, right in combinations(NAMES, 2):
        states_here = [state for ((a, _), (b, _)), state in states.items() if (a, b) == (left, right)]
        num = sum(state != "works" for state in states_here)
        if num:
            lines.append(f"| {left}, {right} | {num} | {len(states_here)} |")
    lines += ["", "## Refused pairs", "", "| choice | with | error message |", "| --- | --- | --- |"]
    lines += [_row(rule) for rule in REFUSED]
    if MEANINGLESS:
        lines += ["", "## Pairs without meaning", "", "| choice | with | reason |", "| --- | --- | --- |"]
        lines += [_row(rule) for rule in MEANINGLESS]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    """Returns the choices of a rule's pairs and its message as a row."""
    pairs = [pair for pair in PAIRS if rule_of(frozenset(pair)) is rule]
    sides = []
    for side in (0, 1):
        group = pairs[0][side][0]
        sides.append(f"{group}: " + ", ".join(dict.fromkeys(pair[side][1] for pair in pairs)))
    return f"| {' | '.join(sides)} | {_message(rule, pairs[0])} |"


def _message(rule: Rule, pair: tuple[Value, Value]) -> str:
    """Returns the message for a pair if the settings alone raise it, else the rule's words."""
    params = params_of(beside(pair))
    try:
        config_of(TorchClassifier(batchSize=12, epochs=2, **params), "classification", ["label"])
    except ValueError as error:
        return str(error)
    return re.sub(r"\\(.)", r"\1", rule.sentence)


if __name__ == "__main__":
    PAGE.write_text(page())
