"""Writes docs/job.schema.json, with which editors complete and check job files.

python scripts/show_job_schema.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.options.checked import Part, listed, parts_of
from ringspark.estimators.options.declare import Options, hints_of, plain
from ringspark.estimators.training.settings.setting import Setting
from ringspark.jobs.row_source import RowSource
from ringspark.jobs.train_job import STAGES, EvaluationSection, Save, StageSection, TrainJob

PAGE = Path(__file__).resolve().parent.parent / "docs" / "job.schema.json"
_SECTIONS: dict[str, Any] = {"data": RowSource, "save": Save}


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a job file; the stage decides which params it has."""
    job = _object(TrainJob, _SECTIONS)
    job["properties"]["evaluation"] = _object(EvaluationSection, _SECTIONS)
    inner = _object(StageSection)
    for part, is_inner in ((job, False), (inner, True)):
        part["properties"]["stage"] = {"enum": [n for n in STAGES if not (is_inner and "Search" in n)]}
        part["allOf"] = [_case(name, is_inner) for name in part["properties"]["stage"]["enum"]]
    settings = {name: _property(each) for name, each in _all_settings().items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Job file of ringspark train",
        **job,
        "$defs": {"settings": settings, "stage": inner},
    }


def text() -> str:
    """Returns the schema as JSON, one line per definition of a setting."""
    found = schema()
    settings = found["$defs"].pop("settings")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(settings.items()))
    rest = json.dumps(found)
    return f'{rest.removesuffix("}}")}, "settings": {{\n{lines}\n}}}}}}\n'


def _json_schema(hint: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type; for a class of options, of the values that its `of` accepts."""
    forms = [form for part in parts_of(hint) for form in _forms(part)]
    if NoneType in get_args(hint):
        forms.append({"type": "null"})
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _forms(part: Part) -> Iterator[dict[str, Any]]:
    kind = part.kind
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        yield TypeAdapter(Annotated[(kind, *part.ranges)] if part.ranges else kind).json_schema()
        return
    for name, variant in (kind.variants() or {"": kind}).items():
        hints = hints_of(variant)
        known = {each.name: _json_schema(hints[each.name]) for each in fields(variant)}
        needed = [each.name for each in fields(variant) if each.default is MISSING]
        if name:
            yield {"const": name}
            known, needed = {"name": {"const": name}, **known}, ["name", *needed]
        yield {"type": "object", "properties": known, "required": needed}
    if kind.SHORTHAND:
        yield _json_schema(hints_of(kind)[kind.SHORTHAND])


def _object(section: Any, inner: dict[str, Any] | None = None) -> dict[str, Any]:
    hints, inner = hints_of(section), inner or {}
    names = [each.name for each in fields(section)]
    return {
        "type": "object",
        "properties": {n: _object(inner[n]) if n in inner else _json_schema(hints[n]) for n in names},
        "required": [
            f.name for f in fields(section) if f.default is MISSING and f.default_factory is MISSING
        ],
        "additionalProperties": False,
    }


def _case(stage: str, is_inner: bool) -> dict[str, Any]:
    names = load_object(STAGES[stage]).SETTINGS
    known: dict[str, Any] = {name: {"$ref": f"#/$defs/settings/{_key(stage, name)}"} for name in names}
    if "estimator" in known:
        known["estimator"] = {"$ref": "#/$defs/stage"}
    params = {"properties": known, "additionalProperties": False}
    return {
        "if": {"properties": {"stage": {"const": stage}}},
        "then": {"properties": {"params": params}},
    }


def _key(stage: str, name: str) -> str:
    """Returns the name of a setting's definition; a search's settings have a prefix."""
    return f"search {name}" if "Search" in stage else name


def _all_settings() -> dict[str, Setting]:
    stages = {stage: load_object(path).SETTINGS for stage, path in STAGES.items()}
    return {_key(stage, name): each for stage, found in stages.items() for name, each in found.items()}


def _property(setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {"description": setting.words}
    # A converter accepts more types than `hint`.
    if setting.convert is None or setting.kinds == [str]:
        value = _json_schema(setting.hint)
        is_list = any(str(kind).startswith("tuple[") for kind in setting.kinds)
        found |= {"anyOf": [value, {"type": "string"}]} if is_list else value
    if setting.default is not None and not setting.default_words:
        found["default"] = plain(listed(setting.default))
    return found


if __name__ == "__main__":
    PAGE.write_text(text())
