"""Assembles the sections and writes the page atomically."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ringspark.extras.report.facts import Facts
from ringspark.extras.report.registry import SECTIONS
from ringspark.extras.report.template import PAGE
from ringspark.pipelines import storage


def check_packages(subject: str = "a report", names: Sequence[str] = ("jinja2", "matplotlib")) -> None:
    """Raises ImportError with the remedy if a package is not installed; `subject` needs the packages."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{subject} needs {' and '.join(names)}, and {' and '.join(missing)} is not installed; "
            "pip install 'ringspark[report]'"
        )


def write_page(facts: Facts, path: str) -> None:
    storage.write_atomic(storage.normalize(path), make_page(facts).encode("utf-8", "replace"))


def make_page(facts: Facts) -> str:
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(PAGE)
    made = [
        {"name": section.name, "title": section.title, "blocks": blocks}
        for section in SECTIONS
        if (blocks := list(section.make(facts)))
    ]
    config = facts.run.config
    task = {"any": "network"}.get(config.task, config.task) if config is not None else "network"
    return template.render(
        title=f"Training of a {task}" if task == "network" else f"Training for {task}",
        subtitle=facts.run.run_uri,
        sections=made,
    )
