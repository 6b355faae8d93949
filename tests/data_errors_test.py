"""`Pipeline.on_error`: damaged elements cost themselves; are counted and bounded."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline

# Numbers that `refuse` fails on, out of 200.
BAD = [x for x in range(200) if x % 50 == 7]


def refuse(x):
    """Fails on 7, 57, 107 and 157."""
    check = tf.debugging.assert_none_equal(
        x % 50, tf.constant(7, x.dtype), message="a seven"
    )
    with tf.control_dependencies([check]):
        return tf.cast(x, tf.float32) * 2


def numbers(n=200):
    return Pipeline.from_arrays(np.arange(n))


def values(dataset):
    return [float(x) for x in dataset]


def test_each_damaged_element_costs_itself_alone(caplog):
    pipeline = numbers().map(refuse).on_error("skip", max_fraction=0.02)
    dataset = pipeline.build()
    expected = [2.0 * x for x in range(200) if x not in BAD]
    for _ in range(2):  # a second epoch counts none of them again
        assert values(dataset) == expected
    assert [one.where for one in pipeline.skipped] == [f"element {x}" for x in BAD]
    assert {one.message for one in pipeline.skipped} == {"a seven"}
    assert "Skipped element 7: a seven." in caplog.text
    assert caplog.text.count("Skipped 4 of 200 elements (2.0 %)") == 1


def test_a_pass_in_which_nothing_can_be_read_is_an_error_whatever_is_allowed():
    dataset = Pipeline.from_arrays(np.array([7, 57])).map(refuse)
    dataset = dataset.on_error("skip", max_fraction=1.0).build()
    with pytest.raises(tf.errors.InvalidArgumentError, match="2 of 2.*one that can"):
        values(dataset)


def test_more_than_the_allowed_share_is_an_error_at_the_end_of_the_pass():
    dataset = numbers().map(refuse).on_error("skip", max_fraction=0.01).build()
    message = (
        "4 of 200 elements cannot be read; expected at most 1.0 % (`max_fraction`), "
        "and one that can. The first: element 7: a seven; element 57: a seven; "
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        values(dataset)


def test_an_error_of_the_source_itself_is_not_swallowed():
    broken = tf.data.Dataset.range(200).map(refuse)
    pipeline = Pipeline.from_dataset(broken).map(lambda x: x + 1).on_error("skip")
    with pytest.raises(tf.errors.InvalidArgumentError, match="a seven"):
        values(pipeline.build())


REFUSED = {
    "nothing to act on": (
        lambda p: p.on_error("skip").build(),
        "`.on_error('skip')` has nothing to act on",
    ),
}


test_wrong_uses_are_refused = refusals(REFUSED, lambda call: call(numbers()))


def damaged_csv(folder, num_bad):
    lines = [f"{n},0" if n >= num_bad else "bad" for n in range(200)]
    (folder / "a.csv").write_text("a,b\n" + "\n".join(lines))
    return Pipeline.from_csv(str(folder / "a.csv"))


def damaged_text(folder, num_bad):
    lines = [b"fine" if n >= num_bad else b"\xff" for n in range(200)]
    (folder / "a.txt").write_bytes(b"\n".join(lines))
    return Pipeline.from_text(str(folder / "a.txt"))


@pytest.mark.parametrize("make", [damaged_csv, damaged_text])
def test_what_sources_skip_is_summed_up_and_judged_exactly(tmp_path, make, caplog):
    pipeline = make(tmp_path, 4).on_error("skip", max_fraction=0.02)
    dataset = pipeline.batch(64).build()
    for _ in range(2):
        assert sum(1 for _ in dataset) == 4
    assert caplog.text.count("Skipped 4 of 200 elements (2.0 %)") == 1
    strict = make(tmp_path, 4).on_error("skip", max_fraction=0.019).build()
    message = "4 of 200 elements cannot be read; expected at most 1.9 %"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(strict)
