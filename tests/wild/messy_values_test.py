"""Values as files and labels have them: gaps in any spelling, 255."""

import numpy as np
import pytest

import tfamp
from tfamp.data import Pipeline

# What pandas reads as missing by default, and what other programs write.
GAPS = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"),
    *("1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    *("?", "-", ".", " ?", " NA"),
]


def table(folder, rows):
    path = folder / "table.csv"
    path.write_text("age,city\n" + "".join(f"{age},{city}\n" for age, city in rows))
    return path


def columns(pipeline):
    rows = list(pipeline.build().as_numpy_iterator())
    return [row["age"] for row in rows], [row["city"] for row in rows]


@pytest.mark.parametrize("gap", GAPS, ids=repr)
@pytest.mark.parametrize("number, dtype", [("4.5", "float32"), ("4", "float64")])
def test_a_gap_in_any_spelling_leaves_a_column_numbers(tmp_path, gap, number, dtype):
    path = table(tmp_path, [(number, "Oslo"), (gap, "Bern"), (number, "Rome")])
    ages, cities = columns(Pipeline.from_csv(path))
    assert np.asarray(ages).dtype == dtype
    np.testing.assert_array_equal(ages, [float(number), np.nan, float(number)])
    assert cities == [b"Oslo", b"Bern", b"Rome"]


def test_a_gap_beside_a_damaged_row(tmp_path):
    rows = [("1.5", "Oslo"), ("N/A", "Bern"), ("old", "Rome"), ("?", "Kyiv")]
    path = table(tmp_path, rows)
    pipeline = Pipeline.from_csv(path, dtypes={"age": "float32"})
    pipeline = pipeline.on_error("skip", max_fraction=0.5)
    ages, cities = columns(pipeline)
    np.testing.assert_array_equal(ages, [1.5, np.nan, np.nan])
    assert cities == [b"Oslo", b"Bern", b"Kyiv"]
    (skipped,) = pipeline.skipped
    assert "'old'" in skipped.message


@pytest.mark.parametrize("word", ["None", "null", "?", "-", "N/A", "."])
def test_words_in_text_are_kept(tmp_path, word):
    # "None" is a kind of basement, "-" an answer.
    path = table(tmp_path, [("1", "Oslo"), ("2", word)])
    assert columns(Pipeline.from_csv(path))[1] == [b"Oslo", word.encode()]


def test_a_column_of_signs_alone_is_text(tmp_path):
    path = table(tmp_path, [("-", "Oslo"), ("?", "Bern")])
    assert columns(Pipeline.from_csv(path))[0] == [b"-", b"?"]


def findings(y, **options):
    x = np.arange(len(y), dtype="float32")[:, None]
    found = tfamp.data.check((x, y), compute_dtype="float32", **options)
    return [one for one in found if one.rule in ("labels", "one_hot")]


BASE = np.arange(300) % 3


def with_255(labels, value=255):
    labels = labels.copy()
    labels[::50] = value
    return labels


def one_hot(value):
    return np.eye(3)[BASE] * value


WRONG = {
    "int64": with_255(BASE),
    "uint8": with_255(BASE.astype("uint8")),
    "float32": with_255(BASE.astype("float32")),
    "masks": with_255(np.tile(BASE[:, None, None], (1, 4, 5))),
    "two classes": (BASE > 0).astype("uint8") * 255,
    "classes from 1": with_255(BASE + 1),
    "one of 99": with_255(BASE, 99),
    "254 and 255": with_255(np.roll(with_255(BASE, 254), 1)),
    "one-hot rows of 255": one_hot(255).astype("uint8"),
    "one-hot rows of 2": one_hot(2.0),
}


@pytest.mark.parametrize("labels", WRONG.values(), ids=WRONG)
def test_labels_far_beyond_the_others_are_found(labels):
    found = findings(labels)
    assert [one.severity for one in found if one.severity != "note"] == ["warning"]


FINE = {
    "three classes": BASE,
    "one-hot": one_hot(1.0),
    "a quantity": np.round(np.geomspace(1, 5000, 300)).astype("int64"),
    "counts": np.minimum(np.random.default_rng(0).poisson(3, 300), 7),
}


@pytest.mark.parametrize("labels", FINE.values(), ids=FINE)
def test_labels_and_quantities_as_they_should_be_give_no_warning(labels):
    assert [one for one in findings(labels) if one.severity != "note"] == []
