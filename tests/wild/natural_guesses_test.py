"""What users of Keras and tf.data write without looking it up works, or says how."""

import re

import keras
import numpy as np
import pytest

import tfamp

X, Y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")


def dense():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def arrays():
    return tfamp.data.Pipeline.from_arrays(X, Y)


# What is written -> what the error says to write.
ANSWERED = {
    "fp16": (lambda: tfamp.enable("fp16"), "mean 'mixed_float16'?"),
    "Lightning's 16-mixed": (lambda: tfamp.enable("16-mixed"), "mean 'mixed_float16'?"),
    "another policy": (
        lambda: tfamp.enable(keras.dtype_policies.get("int8_from_float32")),
        "Unknown `policy` 'int8_from_float32'",
    ),
    "precision=": (lambda: tfamp.enable(precision="16-mixed"), "mean `policy=`?"),
    "mixed_precision=": (lambda: tfamp.scope(mixed_precision="fp16"), "`policy=`?"),
    "exclude=": (lambda: tfamp.enable(exclude=["head"]), "mean `keep_float32=`?"),
    "dtype=": (lambda: tfamp.apply(dense(), dtype="float16"), "mean `policy=`?"),
    "an optimizer": (lambda: tfamp.LossScaleOptimizer("adan"), "adan"),
    "prepare": (lambda: tfamp.prepare(dense()), "mean tfamp.enable?"),
    "fit": (lambda: tfamp.fit(dense()), "mean model.fit, after tfamp.enable?"),
    "a callback of Keras": (
        lambda: tfamp.callbacks.EarlyStopping(),
        "mean keras.callbacks.EarlyStopping?",
    ),
    "what a callback was": (
        lambda: tfamp.callbacks.MicroBatches(),
        "mean tfamp.find_batch_size, which gives batch and accumulation?",
    ),
    "a strategy": (
        lambda: tfamp.distribute.MirroredStrategy(),
        "mean tfamp.distribute.strategy?",
    ),
    "another's module": (
        lambda: tfamp.data.image_dataset_from_directory("."),
        "mean tfamp.data.Pipeline.from_images?",
    ),
    "validation_data=": (
        lambda: tfamp.compare(dense, (X, Y), validation_data=(X, Y)),
        "mean `validation=`?",
    ),
    "a model to compare": (lambda: tfamp.compare(dense(), (X, Y)), "Pass the function"),
    "from_tensor_slices": (
        lambda: tfamp.data.Pipeline.from_tensor_slices((X, Y)),
        "mean tfamp.data.Pipeline.from_arrays?",
    ),
    "element_spec": (lambda: arrays().element_spec, "pipeline.build().element_spec"),
    "num_parallel_calls=": (
        lambda: arrays().map(lambda x, y: (x, y), num_parallel_calls=4),
        "expected `function`. Leave it out.",
    ),
    "a file for an export": (
        lambda: tfamp.export(dense(), "model.onnx"),
        "'model', format='onnx'",
    ),
}


@pytest.mark.parametrize("guess", ANSWERED)
def test_a_guess_is_answered_in_one_line_with_what_to_write(
    guess, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    call, meant = ANSWERED[guess]
    kinds = (AttributeError, TypeError, ValueError)
    with pytest.raises(kinds, match=re.escape(meant)) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not tfamp.status().enabled
    assert not any(tmp_path.iterdir())


def test_enable_in_a_with_block_is_sent_to_scope():
    try:
        with pytest.raises(TypeError, match=r"with tfamp.scope\("):
            with tfamp.enable("mixed_bfloat16"):
                pass
    finally:
        tfamp.disable()


@pytest.mark.parametrize("name", ["model.h5", "folder"])
def test_a_model_of_another_format_says_how_it_is_loaded(name, tmp_path):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    else:
        dense().save(path)
    with pytest.raises(ValueError, match="load them with Keras and call `tfamp.apply"):
        tfamp.load_model(path)


def test_what_is_written_as_in_keras_works(capsys):
    tfamp.disable()
    with tfamp.scope(keras.DTypePolicy("mixed_bfloat16")) as status:
        assert status.policy == "mixed_bfloat16"
        model = dense()
        model.summary()
    assert "Total params" in capsys.readouterr().out
    optimizer = tfamp.LossScaleOptimizer("adam", initial_scale=8.0)
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    pipeline = arrays().shuffle(100).batch(batch_size=4).repeat(2).take(3)
    x, y = next(iter(pipeline))
    assert len(list(pipeline)) == 3 and x.shape == (4, 2)
    history = model.fit(pipeline, validation_data=arrays().batch(4), verbose=0)
    assert np.isfinite(history.history["val_loss"][0])
    assert tfamp.lint(model, (X, Y)) is not None
