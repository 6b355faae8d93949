"""`tfamp.records.findings`: order, filters, the table, and JSON both ways."""

import dataclasses
import re

import pytest

from tfamp.records.findings import Finding, Findings

NOTE = Finding("int64", "note", "x/id is int64.", "Cast it.", column="x/id")
WARNING = Finding("drift", "warning", "It moved.", "Shuffle.", column="x[3]")
ERROR = Finding(
    "overflow",
    "error",
    "12 values pass 65504.",
    "Standardize it.",
    column="x/time",
    figure=12.0,
    details={"num_values": 12, "largest": 1.7e9, "first": None, "dtype": "int64"},
)
LAYER = Finding("softmax", "warning", "In float16.", "Keep it.", layer="head/softmax")
ALL = Findings((NOTE, WARNING, ERROR, LAYER), "100 examples", ("int64", "drift", "nan"))


def test_findings_are_kept_worst_first_and_otherwise_in_order():
    assert list(ALL) == [ERROR, WARNING, LAYER, NOTE]
    assert (ALL[0], len(ALL), ALL.worst) == (ERROR, 4, "error")
    assert (ALL.errors, ALL.warnings, ALL.notes) == (
        (ERROR,),
        (WARNING, LAYER),
        (NOTE,),
    )
    assert len({ERROR, ERROR, NOTE}) == 2, "hashable in spite of details"


FILTERS = {
    "rule": ({"rule": "drift"}, (WARNING,)),
    "severity": ({"severity": "warning"}, (WARNING, LAYER)),
    "column": ({"place": "x/id"}, (NOTE,)),
    "layer": ({"place": "head/softmax"}, (LAYER,)),
    "two at once": ({"rule": "drift", "severity": "error"}, ()),
    "a rule that ran and found nothing": ({"rule": "nan"}, ()),
    "none": ({}, (ERROR, WARNING, LAYER, NOTE)),
}


@pytest.mark.parametrize("filters, expected", FILTERS.values(), ids=FILTERS)
def test_filters(filters, expected):
    assert ALL.of(**filters) == expected


def test_a_rule_that_does_not_exist_is_an_error():
    message = "Unknown `rule` 'drfit'; expected 'int64', 'drift', 'nan', 'overflow' "
    with pytest.raises(ValueError, match=re.escape(message) + ".*'drift'"):
        ALL.of(rule="drfit")


def test_every_field_comes_back_from_json(tmp_path):
    path = tmp_path / "findings.json"
    before = Findings(ALL.findings, ALL.title, ALL.rules, ("drift: no validation",))
    before.to_json(path)
    after = Findings.from_json(path)
    assert after == before
    assert type(after[0].details["num_values"]) is int
    for field in dataclasses.fields(Findings):
        assert getattr(after, field.name) == getattr(before, field.name)


def test_the_table_shows_every_field_and_no_line_is_too_wide():
    text = str(ALL)
    for finding in ALL:
        for word in (finding.severity, finding.place, finding.rule, finding.message):
            assert word in text
    assert text.startswith("100 examples")
    assert max(map(len, text.splitlines())) <= 110


def test_a_note_on_several_layers_is_one_row_with_their_number():
    notes = [Finding("odd", "note", "12 units.", "16.", layer=f"d{i}") for i in (1, 2)]
    other = Finding("odd", "note", "6 units.", "8.", layer="d3")
    bad = [Finding("head", "error", "Half.", "Wide.", layer=f"h{i}") for i in (1, 2)]
    found = Findings((*notes, other, *bad))
    text = str(found)
    assert (text.count("12 units."), text.count("6 units.")) == (1, 1)
    assert "d1 and 1 more" in text and "d2" not in text
    # What spoils the result is told of each.
    assert text.count("Half.") == 2
    assert len(found) == len(found.of()) == 5
