"""What a notebook shows of a result as a cell's last line, and a script of `enable`.

Everything that a public function returns is at most one screen, whatever the size of
the model or the data, and names what it found.
"""

import contextlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.records import versions

SCREEN = 24 * 80  # characters of a terminal's screen
MAX_LINES = 45  # of a notebook's, at its smallest font
rng = np.random.default_rng(0)
X = rng.normal(size=(512, 40)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def deep(policy=None):
    """Returns a compiled model of 60 layers, whose every record is long."""
    with tfamp.scope(policy) if policy else contextlib.nullcontext():
        inputs = x = keras.Input((40,))
        for _ in range(30):
            normed = keras.layers.LayerNormalization()(x)
            x = keras.layers.Dense(40, activation="relu")(normed)
        model = keras.Model(inputs, keras.layers.Dense(1)(x), name="deep")
        model.compile("sgd", "mse")
    return model


def small():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    return model


def enabled():
    try:
        return tfamp.enable("mixed_bfloat16")
    finally:
        tfamp.disable()


def failing():
    broken = X[:32].copy()
    broken[3, 2] = np.nan
    return tfamp.triage(deep("mixed_bfloat16"), (broken, Y[:32]))


def measured():
    how = {"policies": ["float32", "mixed_bfloat16"], "jit_compile": False}
    return tfamp.measure_policies(small(), (X, Y), budget_seconds=2.0, **how)


def mixed():
    return deep("mixed_bfloat16")


def batches(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(32)


LARGE = batches(X * 1e6, Y)
# Name -> what makes it, and a word that its first sight has to have.
RESULTS = {
    "enable": (enabled, "mixed_bfloat16"),
    "assignment": (lambda: tfamp.assignment(mixed()), "deep"),
    "plan": (lambda: tfamp.PrecisionPlan.from_model(mixed()), "mixed_bfloat16"),
    "lint": (lambda: tfamp.lint(deep(), data=(X * 1e6, Y)), "deep"),
    "check of data": (
        lambda: tfamp.data.check(LARGE, compute_dtype="float16"),
        "rule='overflow'",
    ),
    "ranges": (lambda: tfamp.ranges(deep(), (X, Y), num_batches=1), "best_loss_scale"),
    "sensitivity": (
        lambda: tfamp.sensitivity(small(), (X, Y), num_batches=1),
        "verdict='safe'",
    ),
    "prove": (lambda: tfamp.prove(mixed(), (X, Y)), "half_share"),
    "triage": (failing, "cause='data'"),
    "lr_find": (
        lambda: tfamp.training.lr_find(small(), (X, Y), num_steps=50),
        "suggestion=",
    ),
    "estimate_memory": (lambda: tfamp.estimate_memory(small(), 32), "peak_bytes="),
    "measure_policies": (measured, "float32"),
    "fit_statistics": (lambda: tfamp.data.fit_statistics(batches(X)), "Statistics"),
    "bottleneck": (
        lambda: tfamp.data.bottleneck(small(), (X, Y), seconds=0.2),
        "verdict=",
    ),
    "doctor": (tfamp.doctor, "versions"),
    "pipeline": (lambda: tfamp.data.Pipeline.from_arrays(X, Y).batch(32), "Batch"),
}


@pytest.mark.filterwarnings("ignore:.*retracing.*")
@pytest.mark.parametrize("name", RESULTS)
def test_the_last_line_of_a_cell_is_at_most_a_screen(name):
    formatters = pytest.importorskip("IPython.core.formatters")
    made, word = RESULTS[name]
    shown, _ = formatters.DisplayFormatter().format(made())
    text = shown["text/plain"]
    assert len(text) <= SCREEN and len(text.splitlines()) <= 24
    assert word in text
    if name != "pipeline":
        page = shown["text/html"]
        assert page.startswith("<pre") and page.endswith("</pre>")
        assert 1 < len(page.splitlines()) <= MAX_LINES or name == "lint"


def test_a_short_result_reads_as_code_and_signs_of_html_stand_as_they_are():
    finding = tfamp.data.Findings((), title="10 examples")
    assert repr(finding) == (
        "Findings(findings=(), title='10 examples', rules=(), skipped=())"
    )
    model = small()
    model.name = "a<b>&c"
    page = tfamp.assignment(model)._repr_html_()
    assert "a&lt;b&gt;&amp;c" in page and "<b>" not in page


SCRIPT = """
import logging, sys
import tfamp

tfamp.enable("mixed_bfloat16")
with tfamp.scope("float32"):
    pass
print("second", file=sys.stderr, flush=True)
logging.basicConfig(level=logging.INFO, format="of the program: %(message)s")
tfamp.enable("float32")
print("third", file=sys.stderr, flush=True)
logging.getLogger("tfamp").setLevel("WARNING")
tfamp.enable("mixed_bfloat16")
"""


@pytest.mark.slow("it starts a process")
def test_a_script_that_enables_says_so_in_one_line():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    how = {"capture_output": True, "text": True, "env": environment}
    run = subprocess.run([sys.executable, "-c", SCRIPT], timeout=1200, **how)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    first, rest = run.stderr.split("second\n")
    second, third = rest.split("third\n")
    own = [line for line in first.splitlines() if line.startswith("tfamp: ")]
    assert len(own) == 1
    assert "mixed_bfloat16" in own[0] and "named by the caller" in own[0]
    fault = versions.keras_fault(versions.installed_versions()["keras"]) or ()
    line = " ".join(["of the program: float32 (named by the caller).", *fault])
    assert second.splitlines() == [line]
    assert "mixed_bfloat16" not in third
