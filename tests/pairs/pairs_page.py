"""Prints the page "Pairs of settings", the table of all pairs: `make docs` runs it."""

import re
from collections import Counter
from itertools import combinations

import setting_pairs as table
from covering import Value
from setting_choices import GROUPS, params_of
from setting_pairs import COMPRESSED, MEANINGLESS, NAMES, PAIRS, REFUSED, SHARD, Rule

from ringspark.estimators import TorchClassifier
from ringspark.estimators.stages.to_config import config_of

# Short names for long lists of choices.
_SHORT = {
    frozenset(table.matching("mesh", table.CUT)): "every axis but data and shard",
    frozenset(table.matching("mesh", f"{table.CUT}|{SHARD}")): "every axis but data",
    frozenset(table.matching("sync", COMPRESSED)): "every compression",
    frozenset(table.matching("sync", table.OF_SHARDS)): "every compression except CpSGD",
    frozenset(table.matching("sync", f"{COMPRESSED}|between hosts")): "every compression, and between hosts",
    frozenset(table.matching("sync", f"{table.ALONE}|{table.APART}")): "local and asynchronous training",
    frozenset(table.matching("sync", table.NOT_ZERO)): "everything but Zero",
}


def page() -> str:
    states = {pair: table.status(frozenset(pair)) for pair in PAIRS}
    counts = Counter(states.values())
    num_fits = len(table.fits()[0])
    lines = [
        "# Pairs of settings",
        "",
        "Printed by `python tests/pairs/pairs_page.py` from the table that `tests/pairs` tests.",
        "",
        f"The {sum(map(len, NAMES.values()))} choices below form {len(PAIRS):,} pairs of different groups. "
        f"{counts['works']:,} pairs work, {counts['refused']:,} are refused in one sentence before Spark "
        f"starts a job, and {counts['meaningless']:,} have no meaning. No pair is unknown.",
        "",
        f"`make test-all` trains a tiny table in {num_fits} Spark fits, which together contain every working "
        "pair. `make test` runs a sample, which changes every day, and all refusals. A choice makes one of "
        "three promises. *Equal*: the weights equal one worker's weights without this choice, within 1e-5. "
        "*Kept*: the weights equal one worker's weights with this choice, within 1e-5. *Learns*: the loss "
        "falls. If a fit has a choice that only learns, the test checks only the loss. AdamW, Adafactor and "
        "LAMB divide a gradient by its size, so the test compares their losses, within 1e-4. To train "
        "without an *equal* choice, the test takes the default of its group, in bold.",
        "",
        "## Choices",
        "",
        "| group | equal | kept | learns |",
        "| --- | --- | --- | --- |",
    ]
    for group, choices in GROUPS.items():
        cells = [
            ", ".join(f"**{c.name}**" if c is choices[0] else c.name for c in choices if c.promise == kind)
            for kind in ("equal", "kept", "learns")
        ]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Pairs of groups",
        "",
        "Each row counts the pairs of two groups that are refused or have no meaning. All other groups work "
        "together.",
        "",
        "| groups | refused or without meaning | all pairs |",
        "| --- | --- | --- |",
    ]
    for left, right in combinations(NAMES, 2):
        states_here = [state for ((a, _), (b, _)), state in states.items() if (a, b) == (left, right)]
        num = sum(state != "works" for state in states_here)
        if num:
            lines.append(f"| {left}, {right} | {num} | {len(states_here)} |")
    lines += ["", "## Refused pairs", ""]
    lines += ["| choice | with | error message, or words of it |", "| --- | --- | --- |"]
    lines += [_row(rule) for rule in REFUSED]
    if MEANINGLESS:
        lines += ["", "## Pairs without meaning", "", "| choice | with | reason |", "| --- | --- | --- |"]
        lines += [_row(rule) for rule in MEANINGLESS]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    pairs = [pair for pair in PAIRS if table.rule_of(frozenset(pair)) is rule]
    sides = []
    for side in (0, 1):
        group = pairs[0][side][0]
        names = list(dict.fromkeys(pair[side][1] for pair in pairs))
        sides.append(f"{group}: {_SHORT.get(frozenset(names)) or ', '.join(names)}")
    return f"| {' | '.join(sides)} | {_message(rule, pairs[0])} |"


def _message(rule: Rule, pair: tuple[Value, Value]) -> str:
    """Returns the error message if the settings alone raise it; otherwise the rule's pattern."""
    params = params_of(table.beside(pair))
    try:
        config_of(TorchClassifier(batchSize=12, epochs=2, **params), "classification", ["label"])
    except ValueError as error:
        return str(error)
    return re.sub(r"\\(.)", r"\1", rule.sentence)


if __name__ == "__main__":
    print(page(), end="")
