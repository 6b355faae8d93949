"""Integer exports keep the layers in float32 that integers would spoil, and say why."""

import json

import keras
import numpy as np
import pytest

import tfamp
from tests.export_runtimes_test import written
from tests.int8_test import dense_net, inputs_of, plant
from tfamp.serving.exports.request import PACKAGES


def planted():
    keras.utils.set_random_seed(1)
    model = dense_net()
    plant(model, "d1", "d2")
    x = inputs_of(model, 700)
    return model, x, model.predict(x, verbose=0).argmax(axis=1)


SPOILT = {
    "onnx dynamic": {"d2"},
    "onnx static": {"d1", "d2"},
    "litert dynamic": {"d2"},
    "litert static": {"d1", "d2"},
    "openvino static": {"d1", "d2"},
}


@pytest.mark.slow("the search is tested above; each real export takes seconds")
@pytest.mark.parametrize("how", SPOILT)
def test_a_planted_outlier_channel_passes_the_gate(how, tmp_path):
    format, scheme = how.split()
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    model, x, y = planted()
    found = tfamp.export(
        *(model, tmp_path / "model"),
        format=format,
        dtype="int8",
        scheme=scheme,
        calibration=x[:64],
        validation=(x, y),
        tolerance=0.05,
        budget_seconds=0.001,
    )
    assert set(found.int8.layers) == SPOILT[how] and "an outlier" in found.kept["d2"]
    assert len(found.int8.evaluations) <= 3 and found.verdict.startswith("as good")
    assert found.kept["head"].startswith("a head") and found.int8.holds
    record = json.loads((tmp_path / "model" / "export.json").read_text())
    assert record["kept"] == found.kept and record["plan"]["int8"]["holds"] is True
    answers = np.asarray(found.load().predict(x)).argmax(axis=1)
    assert np.mean(answers == y) > 0.95


@pytest.mark.slow("each quantiser; the anchor is one of them")
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.quick("litert dynamic")
def test_a_file_leaves_in_float_what_it_is_asked_to(how, tmp_path):
    format, scheme = how.split()
    model, x, y = planted()
    right = []
    for keep in ({}, dict.fromkeys(SPOILT[how], "spoilt")):
        folder = tmp_path / str(len(keep))
        folder.mkdir()
        options = {"calibration": ({model.inputs[0].name: x[:64]},), "keep": keep}
        loaded = written(model, format, folder, "int8", scheme, **options)
        right.append(np.mean(loaded.predict(x).argmax(axis=1) == y))
    assert right[0] < 0.9 and right[1] > 0.95
