"""Backbones and tasks of KerasHub train, generate, are saved and loaded."""

import numpy as np
import pytest

pytest.importorskip("keras_hub", reason="KerasHub is not installed")

from tests.wild import checking, corpus, programs_of_hub  # noqa: E402 - may skip
from tests.wild.programs.registry import PROGRAMS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = checking.cases(p for p in PROGRAMS.values() if p.field == programs_of_hub.FIELD)


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader(programs_of_hub.__name__) as loader:
        yield loader


@pytest.mark.anchors("gpt2-enable-mixed_float16", "bert-apply-mixed_bfloat16")
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_it_trains_as_in_float32_generates_and_is_loaded(
    program, way, policy, loader, tmp_path
):
    outcome = checking.check(program, way, policy, loader, tmp_path)
    expected = corpus.float32(program).trained.answers
    for name, answer in outcome.trained.answers.items():
        np.testing.assert_array_equal(answer, expected[name])
