"""Old lines on mixed precision may stay: each program trains as stock, or better."""

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import keras
import pytest

import tfamp
from tests.wild import old_lines

ROOT = Path(__file__).parents[2]
# Of the error that is left; stock's float16 differs from float32 by 0.1 %.
TOLERANCE = 0.01
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
OTHERS = ("alone", "another compiled", "another trained")


def cases():
    """Every way with every line, and each of these with every other model."""
    for w, way in enumerate(old_lines.WAYS):
        for number, (name, lines) in enumerate(old_lines.LINES.items()):
            others = {OTHERS[(w + number) % 3]}
            if way == "fit" or name == "all":
                others |= {*OTHERS} if way == "train_step" else {"alone"}
            for other in sorted(others):
                case = f"{way}-{name}-{other}"
                yield pytest.param(way, lines, other, id=case)


@pytest.fixture(scope="module")
def stock(request, tmp_path_factory):
    """What stock Keras makes of the programs asked for, in a process without tfamp.

    The processes of the suite, which share this file, share what it found.
    """
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path
    ]
    asked = sorted({(case["way"], old_lines.key_of(case["lines"])) for case in cases})
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "stock_old_lines.json"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            done = subprocess.run(
                [sys.executable, "-m", "tests.wild.old_lines", json.dumps(asked)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            path.write_text(done.stdout)
    return json.loads(path.read_text())


@pytest.fixture
def enabled():
    """Programs under the one line; what they set is taken back."""
    tfamp.enable("mixed_float16")
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def another(kind):
    """A model that lives beside the program's own and has nothing to do with it."""
    if kind == "alone":
        return None
    model = old_lines.network(old_lines.Lines())
    model.compile(keras.optimizers.Adam(), "mse")
    if kind == "another trained":
        model.fit(old_lines.x, old_lines.y, batch_size=64, verbose=0)
    return model


def prepared(lines):
    if lines.sets_policy:
        keras.mixed_precision.set_global_policy("mixed_float16")
    return lines


@pytest.mark.quick("fit-no line-alone", "*-all-alone", "train_step-all-another trained")
@pytest.mark.parametrize(("way", "lines", "other"), [*cases()])
def test_a_program_trains_as_in_float32(way, lines, other, stock, enabled):
    kept = another(other)
    left = old_lines.run(way, prepared(lines))
    exact = stock[way]["float32"]
    theirs = stock[way][old_lines.key_of(lines)]
    assert abs(left / exact - 1) <= max(TOLERANCE, 0), (left, exact, theirs)
    # Better than stock where that stands still, and never worse.
    assert left <= theirs * (1 + TOLERANCE)
    del kept
