"""Every family of `keras.applications` trains, is saved and loaded."""

import inspect

import pytest
from keras import applications

from tests.wild import checking, corpus, programs_of_applications
from tests.wild.programs.registry import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = checking.cases([PROGRAMS[f] for f in programs_of_applications.FAMILIES], {})


@pytest.fixture(scope="module")
def loader():
    with corpus.Loader() as loader:
        yield loader


@pytest.mark.anchors("VGG-enable-mixed_bfloat16")
@pytest.mark.parametrize(("program", "way", "policy"), CASES)
def test_a_family_trains_as_in_float32_and_is_loaded(
    program, way, policy, loader, tmp_path
):
    checking.check(program, way, policy, loader, tmp_path)


def test_no_family_is_left_out():
    makers = [make for make, _ in programs_of_applications.FAMILIES.values()]
    # Further members of a family, other names of one, and no models at all.
    known = {"imagenet_utils", "mobilenet_v3", "resnet50", "vgg19"}
    for name, module in inspect.getmembers(applications, inspect.ismodule):
        assert name in known or any(make in vars(module).values() for make in makers)
