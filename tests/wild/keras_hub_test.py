"""Backbones and tasks of KerasHub train, generate, are saved and loaded."""

import functools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("keras_hub", reason="KerasHub is not installed")

from tests.wild import checking, corpus, programs_of_hub  # noqa: E402 - may skip
from tests.wild.programs.registry import PROGRAMS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = checking.cases(p for p in PROGRAMS.values() if p.field == programs_of_hub.FIELD)


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader(programs_of_hub.__name__) as loader:
        yield loader


@functools.cache
def in_float32(program):
    return corpus.run(program, "float32", "float32").trained


@pytest.mark.slow("tests/integrations_test.py trains none, and saves and loads one")
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_it_trains_as_in_float32_generates_and_is_loaded(
    program, way, policy, loader, tmp_path
):
    outcome = checking.check(program, way, policy, loader, tmp_path)
    expected = in_float32(program)
    for name, answer in outcome.trained.answers.items():
        for text, exact in zip(answer, expected.answers[name], strict=True):
            for place in np.flatnonzero(text != exact)[:1]:  # those after follow it
                other = text[place]
                assert is_near_tie(expected.model, exact, place, other, policy)


def is_near_tie(model, text, place, other, policy):
    """Returns whether float32 prefers a token of a text by less than a half's rounding.

    A handful of roundings to `policy` of logits between -1 and 1 may turn that over.
    """
    ids = text[None].astype("int32")
    logits = model({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    of_place = np.asarray(logits)[0, place - 1]
    half = tf.as_dtype(policy.removeprefix("mixed_")).as_numpy_dtype
    return of_place[text[place]] - of_place[other] < 8 * ml_dtypes.finfo(half).eps
