"""Every tool takes every form of data that `fit` takes, and sees the same numbers."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.stepping.arguments import dataset_of
from tfamp.trials.parcel import as_fit_takes_it
from tfamp.trials.parcel import batch_of as tried_batch
from tfamp.trials.run_records import Run
from tfamp.trials.worker import train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4))  # float64, as NumPy makes it
Y = X[:, :1] * 2
WEIGHTS = np.linspace(0.5, 1.5, 40)
PARTS = [X.astype("float32"), Y.astype("float32"), WEIGHTS.astype("float32")]
BATCHES = [tuple(part[i : i + 8] for part in PARTS) for i in range(0, 40, 8)]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return [part.astype("float64") for part in BATCHES[index]]


FORMS = {
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(tuple(PARTS)).batch(8),
    "pipeline": lambda: tfamp.data.Pipeline.from_dataset(
        tf.data.Dataset.from_tensor_slices(tuple(PARTS))
    ).batch(8),
    "PyDataset": lambda: Sequence(workers=2),
    "generator": lambda: (batch for batch in itertools.cycle(BATCHES)),
    "arrays": lambda: (X, Y, WEIGHTS),
    "tensors": lambda: [tf.constant(part) for part in PARTS],
}


def made():
    keras.utils.clear_session()  # names count the models before
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="linear")
    model.compile("sgd", "mse")
    return model


def trained(data):
    batch_size = 8 if isinstance(data, (tuple, list)) else None
    given = {"run": Run("float32", 0), "epochs": 1, "batch_size": batch_size}
    found = train(made(), as_fit_takes_it(data), None, **given)[0]
    return found.num_steps, found.batch_size


TOOLS = {
    "ranges": lambda model, data: tfamp.ranges(model, data, batch_size=8).to_json(),
    "prove": lambda model, data: tfamp.prove(model, data, batch_size=8).to_json(),
    "lint": lambda model, data: str(tfamp.lint(model, data=data, batch_size=8)),
    "bottleneck": lambda model, data: (
        tfamp.data.bottleneck(model, data, seconds=0.01, batch_size=8).batch_size
    ),
}


@pytest.mark.quick("prove")
@pytest.mark.parametrize("tool", TOOLS)
def test_every_form_gives_the_same_answer(tool):
    answers = {name: TOOLS[tool](made(), form()) for name, form in FORMS.items()}
    assert all(answer == answers["dataset"] for answer in answers.values()), answers


@pytest.mark.quick("pipeline", "arrays", "tensors")
@pytest.mark.parametrize("form", FORMS)
def test_triage_takes_the_first_batch(form):
    parts = [np.array(part) for part in BATCHES[0]]
    parts[0][3] = np.nan
    bad = FORMS[form]()
    if form == "arrays":
        bad = tuple(parts)
    assert tfamp.triage(made(), bad).cause == ("data" if form == "arrays" else "none")


@pytest.mark.quick("pipeline", "generator")
@pytest.mark.parametrize("form", FORMS)
def test_a_search_for_batches_and_a_comparison_take_it(form):
    batch = tried_batch(FORMS[form]())
    assert len(batch.parts) == 3
    assert batch.num_examples == (None if form == "generator" else 40)
    assert batch.size == (32 if form in ("arrays", "tensors") else 8)
    if form != "generator":
        assert trained(FORMS[form]()) == (5, 8)


def test_lengths_that_vary_stay_open_and_a_generator_goes_on_where_it_is():
    made = (tf.zeros((2, n)) for n in (3, 4, 5))
    dataset = dataset_of(made)
    assert dataset.element_spec.shape == (None, None)
    assert [len(x[0]) for x in dataset.take(1)] == [3]
    assert [len(x[0]) for x in dataset] == [3, 4, 5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="ended after 3 batches"):
        next(iter(dataset))


REFUSED = {
    "a model": (made(), "`data` is of type Sequential; expected what `fit` takes"),
    "an iterator": (iter(BATCHES), "`data` is of type list_iterator; expected what"),
    "x alone": (X, "`data` is of type ndarray; expected what `fit` takes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    data, message = REFUSED[case]
    with pytest.raises(TypeError, match=re.escape(message)):
        dataset_of(data)


def test_refuses_single_examples_of_a_generator():
    with pytest.raises(ValueError, match="so they are single examples"):
        dataset_of((np.float32(i), np.float32(i)) for i in range(3))
