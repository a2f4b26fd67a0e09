"""Prints docs/settings.md: every setting of the estimators, what is refused together, what has no effect.

    python scripts/show_settings.py > docs/settings.md

All of it comes from the tables that the package itself works by.
"""

from __future__ import annotations

import re

from ringspark.estimators import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.estimators.stages.advice import ON_SHARDS
from ringspark.estimators.stages.advice import RULES as WITHOUT_EFFECT
from ringspark.estimators.training.settings.rules import COMBINATIONS

# Defaults that depend on what is installed.
BY_INSTALLATION = {
    "collective": "`'horovod'` where installed, else `'torch'`",
    "reader": "`'petastorm'` where installed, else `'arrow'`",
}


def main() -> None:
    """Prints the page."""
    print("# Settings\n")
    print("Printed by `python scripts/show_settings.py` from the tables that the package works by.")
    _table("Every setting", ["setting", "meaning", "default"], _params())
    _table(
        "Refused together, before anything starts",
        ["together", "the sentence"],
        [[f"`{rule.settings}`", _sentence(rule.message)] for rule in COMBINATIONS],
    )
    rows = [[f"`{name}`", reason] for name, _, reason in WITHOUT_EFFECT]
    rows += [[f"`{name}`", "of `fitOnShards`: the shards were divided when written"] for name in ON_SHARDS]
    _table("Without effect, said in a warning", ["setting", "where"], rows)


def _params() -> list[list[str]]:
    """All Params of the three estimators, in alphabetical order."""
    rows = {}
    for stage in (TorchEstimator(), TorchRegressor(), TorchClassifier()):
        for param in stage.params:
            default = f"`{stage.getOrDefault(param)!r}`" if stage.hasDefault(param) else ""
            rows[param.name] = [f"`{param.name}`", param.doc, BY_INSTALLATION.get(param.name, default)]
    return [rows[name] for name in sorted(rows)]


def _sentence(message: str) -> str:
    """The sentence with the names of what is put into it."""
    return re.sub(r"\{(\w+)(?:![rs])?\}", r"*\1*", message)


def _table(title: str, header: list[str], rows: list[list[str]]) -> None:
    print(f"\n## {title}\n")
    for line in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |")


if __name__ == "__main__":
    main()
