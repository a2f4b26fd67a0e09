"""The sections of a report, in the order of the page; each has its own file."""

from __future__ import annotations

from ringspark.extras.report.content import Section
from ringspark.extras.report.sections import (
    attribution,
    classification,
    curves,
    data,
    environment,
    faults,
    headline,
    memory,
    regression,
    settings,
    throughput,
    time_shares,
)

SECTIONS: tuple[Section, ...] = (
    headline.SECTION,
    curves.SECTION,
    classification.SECTION,
    regression.SECTION,
    attribution.SECTION,
    throughput.SECTION,
    time_shares.SECTION,
    memory.SECTION,
    data.SECTION,
    settings.SECTION,
    faults.SECTION,
    environment.SECTION,
)
