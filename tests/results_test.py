"""Records: the round trip through JSON with every kind of field, and refusals."""

import dataclasses
import re
from typing import Any, Literal

import pytest

from tests.refusals import refusals
from tfamp.machine.speeds import Device, Recommendation
from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class Inner(Record):
    name: str
    numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer(Record):
    SCHEMA = 3

    count: int
    share: float
    is_done: bool
    kind: Literal["one", "two"]
    inner: Inner
    several: tuple[Inner, ...]
    pair: tuple[str, float]
    by_name: dict[str, Inner]
    either: Device | Inner
    maybe: Inner | None = None
    values: list[float] = dataclasses.field(default_factory=list)
    anything: Any = None


OUTER = Outer(
    count=7,
    share=0.1,
    is_done=True,
    kind="two",
    inner=Inner("a", (1, 2)),
    several=(Inner("b"), Inner("c", (3,))),
    pair=("text", 2.5),
    by_name={"x": Inner("d", (4,))},
    either=Inner("e", (5,)),
    maybe=Inner("f", (6,)),
    values=[1.5, 2.5],
    anything={"free": [1, "two"]},
)
DEVICE = Device("gpu", "NVIDIA A100", (8, 0), 40 * 2**30, ("x", "y"), True)


@pytest.mark.parametrize(
    "record",
    [OUTER, DEVICE, Recommendation("mixed_float16", "A reason.")],
    ids=lambda record: type(record).__name__,
)
def test_every_field_survives_the_round_trip(record, tmp_path):
    path = tmp_path / "record.json"
    text = record.to_json(path)
    for source in (text, path, str(path)):
        again = type(record).from_json(source)
        for field in dataclasses.fields(record):
            before, after = getattr(record, field.name), getattr(again, field.name)
            assert after == before != field.default, field.name
            assert type(after) is type(before), field.name


FIELDS = "('policy', 'reason')"
BAD = {
    "missing field": (
        {"policy": "float32"},
        "Fields ('reason',) of Recommendation are unknown, or missing; expected "
        f"{FIELDS}. Correct them, or update tfamp if a later version wrote them.",
    ),
    "other class": (
        {"class": "Device", "policy": "float32", "reason": ""},
        "Found a record of 'Device', schema 1; expected 'Recommendation', at most 1. "
        "Read it by its class, or update tfamp.",
    ),
    "later schema": (
        {"schema": 2, "policy": "float32", "reason": ""},
        "Found a record of 'Recommendation', schema 2; expected 'Recommendation', at "
        "most 1. Read it by its class, or update tfamp.",
    ),
}


test_a_dictionary_that_does_not_fit_is_an_error = refusals(
    BAD, Recommendation.from_dict
)


WRONG = {
    "a number for a flag": ("is_done", 1, "bool"),
    "a flag for a number": ("count", True, "int"),
    "no member of a union": ("either", 3, None),
}


@pytest.mark.parametrize("name, value, expected", WRONG.values(), ids=WRONG)
def test_a_value_of_another_type_is_an_error(name, value, expected):
    values = OUTER.to_dict() | {name: value}
    message = "; expected "
    if expected is not None:
        message += f"{expected}. Correct it, or write the record again."
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Outer.from_dict(values)
    assert str(caught.value).startswith(f"`{name}` of Outer is ")


def test_text_that_is_not_json_is_an_error(tmp_path):
    message = "; expected a record of Device. Write it again with `to_json`."
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Device.from_json('{"kind": ')
    assert str(caught.value).startswith("The text is not JSON (Expecting value")
    path = tmp_path / "cut.json"
    path.write_text('{"kind"')
    with pytest.raises(ValueError, match=re.escape(f"The file {str(path)!r} is not")):
        Device.from_json(path)


REFUSED = {
    "what JSON cannot hold": (
        lambda: dataclasses.replace(OUTER, anything={1, 2}).to_json(),
        "`anything` of Outer holds {1, 2}, of type set; expected numbers, text, "
        "records, tuples, or dicts with text as keys. Convert it first.",
        TypeError,
    ),
}
test_what_cannot_be_read_or_written_is_refused = refusals(REFUSED)
