"""The programs of `programs/` train, are saved and loaded under both mixed policies."""

import keras
import pytest

from tests.wild import checking, corpus, programs
from tests.wild.programs.registry import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")
# By what stands between the brackets of a case.
FAILURES: dict[str, str] = {}
CASES = checking.cases(
    [
        p
        for p in PROGRAMS.values()
        if p.run.__module__.startswith(f"{programs.__name__}.")
    ],
    FAILURES,
)


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader(programs.__name__) as loader:
        yield loader


@pytest.mark.anchors(
    "digits_convnet-apply-mixed_float16",
    "own_train_step-enable-mixed_float16",
    "vae-enable-mixed_float16",
    "dcgan-enable-mixed_float16",
    "bidirectional_lstm-enable-mixed_bfloat16",
)
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_it_trains_as_in_float32_and_is_loaded(program, way, policy, loader, tmp_path):
    checking.check(program, way, policy, loader, tmp_path)


@pytest.mark.whole("of one seed: test_it_trains_as_in_float32_and_is_loaded")
@pytest.mark.parametrize(
    ("program", "way", "policy"),
    [c for c in CASES if "enable" in c.values and not c.marks],
)
def test_the_median_of_three_seeds_is_that_of_float32(program, way, policy):
    reference = corpus.median_loss(program, "float32", "float32")
    loss = corpus.median_loss(program, way, policy)
    assert corpus.distance(loss, reference) <= program.tolerance
    keras.utils.clear_session()
