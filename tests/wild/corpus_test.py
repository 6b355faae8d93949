"""The programs of `programs/`, and every family of `keras.applications`.

They train, are saved and loaded under both mixed policies; the docs have their table.
"""

import inspect

import keras
import pytest
from keras import applications

from tests.wild import checking, corpus, programs, programs_of_applications, table
from tests.wild.programs.registry import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = programs_of_applications.FAMILIES
CASES = checking.cases(
    p for p in PROGRAMS.values() if p.run.__module__.startswith(programs.__name__ + ".")
)
OF_FAMILIES = checking.cases(PROGRAMS[family] for family in FAMILIES)


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader(programs.__name__) as loader:
        yield loader


@pytest.mark.quick(
    "digits_convnet-apply-mixed_float16",
    "own_train_step-enable-mixed_float16",
    "vae-enable-mixed_float16",
    "dcgan-enable-mixed_float16",
    "bidirectional_lstm-enable-mixed_bfloat16",
)
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_it_trains_as_in_float32_and_is_loaded(program, way, policy, loader, tmp_path):
    checking.check(program, way, policy, loader, tmp_path)


@pytest.mark.slow("of one seed: test_it_trains_as_in_float32_and_is_loaded")
@pytest.mark.parametrize(
    ("program", "way", "policy"),
    [case for case in CASES if "enable" in case.values],
)
def test_the_median_of_three_seeds_is_that_of_float32(program, way, policy):
    reference = corpus.median_loss(program, "float32", "float32")
    loss = corpus.median_loss(program, way, policy)
    assert corpus.distance(loss, reference) <= program.tolerance
    keras.utils.clear_session()


@pytest.mark.quick("VGG-enable-mixed_bfloat16")
@pytest.mark.parametrize(("program", "way", "policy"), OF_FAMILIES)
def test_a_family_trains_as_in_float32_and_is_loaded(
    program, way, policy, loader, tmp_path
):
    checking.check(program, way, policy, loader, tmp_path)


def test_no_family_is_left_out():
    makers = [make for make, _ in FAMILIES.values()]
    # Further members of a family, other names of one, and no models at all.
    known = {"imagenet_utils", "mobilenet_v3", "resnet50", "vgg19"}
    for name, module in inspect.getmembers(applications, inspect.ismodule):
        assert name in known or any(make in vars(module).values() for make in makers)


def test_every_program_has_a_row_without_an_empty_cell():
    rows = table.rows_of(table.OUT.read_text(encoding="utf-8"))
    assert set(PROGRAMS) | set(FAMILIES) <= set(rows)
    for row in rows.values():
        assert len(row) == len(table.COLUMNS)
        assert all(cell.strip() for cell in row)


def test_what_is_written_is_read_again():
    rows = {name: (name, *"bcdefghi", "0.1 (9% off)") for name in ("vae", "dcgan")}
    assert table.rows_of(table.heading() + table.rendered(rows)) == rows
