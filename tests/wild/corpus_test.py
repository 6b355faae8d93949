"""The programs of `programs/`, and the families of `keras.applications`.

They train, are saved and loaded under both mixed policies; the docs have their table.
"""

import inspect

import keras
import numpy as np
import pytest
from keras import applications

import tfamp
from tests.wild import checking, corpus, programs, table
from tests.wild.programs.registry import PROGRAMS
from tests.wild.programs_of_applications import FAMILIES, TRAINED, built

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = checking.cases(
    program
    for name, program in PROGRAMS.items()
    if program.field != "KerasHub" and name not in FAMILIES.keys() - TRAINED
)


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader(programs.__name__) as loader:
        yield loader


@pytest.mark.quick(
    "digits_convnet-apply-mixed_float16",
    "vae-enable-mixed_bfloat16",
)
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_it_trains_as_in_float32_and_is_loaded(
    program, way, policy, loader, tmp_path, request
):
    """Where there is time for it, by the median of three seeds."""
    is_long = way == "enable" and request.node.get_closest_marker("slow")
    seeds = corpus.SEEDS if is_long else 1
    checking.check(program, way, policy, loader, tmp_path, seeds=seeds)


@pytest.mark.slow("test_it_trains_as_in_float32_and_is_loaded, of those that train")
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - TRAINED))
def test_a_family_predicts_as_in_float32(family):
    keras.utils.set_random_seed(0)
    exact, x, _ = built(family)
    wanted = exact.predict(x, verbose=0)
    for policy in corpus.POLICIES:
        with tfamp.scope(policy):
            model, _, _ = built(family)
        model.set_weights(exact.get_weights())
        # Of probabilities of three classes, after up to 200 layers.
        np.testing.assert_allclose(model.predict(x, verbose=0), wanted, atol=0.05)
        keras.utils.clear_session()


def test_no_family_is_left_out():
    makers = [make for make, _ in FAMILIES.values()]
    # Further members of a family, other names of one, and no models at all.
    known = {"imagenet_utils", "mobilenet_v3", "resnet50", "vgg19"}
    for name, module in inspect.getmembers(applications, inspect.ismodule):
        assert name in known or any(make in vars(module).values() for make in makers)


def test_every_program_has_a_row_that_is_marked_beyond_float32s_own_spread():
    page = table.OUT.read_text(encoding="utf-8")
    rows = table.rows_of(page)
    to_come = page.partition(table.AHEAD)[2].strip(" .\n").split(", ")
    assert set(PROGRAMS) <= {*rows, *to_come}
    for row in rows.values():
        assert len(row) == len(table.COLUMNS)
        assert all(cell.strip() for cell in row)
        cells = dict(zip(table.COLUMNS, row, strict=True))
        if "not judged" in cells[table.SPREAD]:
            continue
        limit = table.spreads()[row[0]] + 0.001  # as figures are rounded
        for name in table.LOSSES:
            loss = cells[name].split(" ")[0]
            if loss.replace(".", "").replace("-", "").isdigit():
                far = corpus.distance(float(loss), float(cells["float32"]))
                assert far <= limit or "off)" in cells[name], row[0]
