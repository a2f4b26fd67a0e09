"""Prints the page "Settings" from the tables of the package; `make docs` runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ringspark.estimators.options.checked import listed
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.declare import Options
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.training.settings.capabilities import VALUES, SettingValue
from ringspark.estimators.training.settings.rules import COMBINATIONS
from ringspark.estimators.training.settings.table import SETTINGS

_RECORDED = "yes, and [recorded](continue.md#changed-settings)"


def main() -> None:
    print("# Settings\n")
    print("Printed by `python scripts/show_settings.py` from the tables that the package uses.")
    _table("Every setting", ["setting", "meaning", "default", "rule", "may change on resume"], _settings())
    print("\n## Options\n")
    print("A setting with options is one of these classes, or a dict of the same names.")
    classes: list[Any] = [setting.options for setting in SETTINGS.values() if setting.options is not None]
    for kind in (*classes, Pipeline):
        for variant in kind.variants().values() or [kind]:
            _show_options(variant)
    _show_options(Compression)
    common = {each.name: each.default for each in fields(Compression)}
    for variant in Compression.variants().values():
        _show_options(variant, common)
    _table(
        "Combinations that raise an error",
        ["combination", "error message"],
        [[f"`{rule.settings}`", _sentence(rule.message)] for rule in COMBINATIONS],
    )
    _table(
        "Values that exclude each other",
        ["capability", "needed by", "taken away by"],
        _capabilities(),
        "Two values cannot be combined if one needs what the other takes away. The error names both values, "
        "the reason, and the settings to change. Two values of one setting never exclude each other.",
    )
    idle = [(s.name, s.without_effect[1]) for s in SETTINGS.values() if s.without_effect is not None]
    written = [setting.name for setting in SETTINGS.values() if setting.is_for_writing]
    idle += [(name, "`fitOnShards` reads shards that are already written") for name in written]
    _table(
        "Settings without effect, which log a warning",
        ["setting", "when"],
        [[f"`{n}`", why] for n, why in idle],
    )


def _show_options(kind: type[Options], common: Mapping[str, Any] | None = None) -> None:
    """Prints the option table of a class and its bases, without the options of `common`."""
    words: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = (base.__doc__ or "").partition("Attributes:\n")
        for match in re.finditer(r"^ {8}(\w+): ((?:.+\n?(?: {12}.+\n?)*))", attributes, re.M):
            words[match[1]] = " ".join(match[2].split())
    print(f"\n### {kind.__name__}\n\n{' '.join((kind.__doc__ or '').partition('Attributes:')[0].split())}")
    rows = [
        [f"`{each.name}`", words[each.name], "" if each.default is MISSING else f"`{each.default!r}`"]
        for each in fields(kind)
        if common is None or each.name not in common or common[each.name] != each.default
    ]
    if rows:
        print()
        _print_rows(["option", "meaning", "default"], rows)


def _settings() -> list[list[str]]:
    """Returns a row per setting of the three estimators, sorted by name."""
    return [
        [
            f"`{name}`",
            setting.words,
            setting.default_words or ("" if setting.default is None else f"`{listed(setting.default)!r}`"),
            f"{setting.rule}; {setting.remedy}" if setting.remedy else setting.rule,
            "yes" if setting.may_differ_on_resume else _RECORDED if setting.recorded_on_resume else "",
        ]
        for name, setting in sorted(SETTINGS.items())
    ]


def _capabilities() -> list[list[str]]:
    """Returns a row per capability: what needs it, and what takes it away and how."""
    needed = dict.fromkeys(name for value in VALUES for name in value.needs)
    return [
        [
            name,
            ", ".join(dict.fromkeys(_shown(v) for v in VALUES if name in v.needs)),
            "; ".join(f"{_shown(v)}: {v.takes[name]}" for v in VALUES if name in v.takes),
        ]
        for name in sorted(needed)
    ]


def _sentence(message: str) -> str:
    """Returns the message with names as its placeholders."""
    named = message.replace("{readers}", "numWorkers (only workers that read different rows)")
    return re.sub(r"\{(?:[\w.]+[.\[])?(\w+)\]?(?:![rs])?\}", r"*\1*", named)


def _shown(value: SettingValue) -> str:
    return value.shown or (value.text if "{" not in value.text else value.setting)


def _table(title: str, header: list[str], rows: list[list[str]], note: str = "") -> None:
    print(f"\n## {title}\n")
    if note:
        print(f"{note}\n")
    _print_rows(header, rows)


def _print_rows(header: list[str], rows: list[list[str]]) -> None:
    for line in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |")


if __name__ == "__main__":
    main()
