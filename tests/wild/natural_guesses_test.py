"""What users of Keras and tf.data write without looking it up works, or says how."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")


def test_a_pipeline_prefetches_by_itself_as_tf_data_does():
    x = np.arange(6.0)
    pipeline = tfamp.data.Pipeline.from_arrays(x).batch(2).prefetch(tf.data.AUTOTUNE)
    assert [batch.tolist() for batch in pipeline.build().as_numpy_iterator()] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_a_policy_of_keras_names_one():
    with tfamp.scope(keras.DTypePolicy("mixed_bfloat16")) as status:
        assert status.policy == "mixed_bfloat16"
        assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    with pytest.raises(ValueError, match="Unknown `policy` 'int8_from_float32'"):
        tfamp.enable(keras.dtype_policies.get("int8_from_float32"))


def test_enable_in_a_with_block_is_sent_to_scope():
    try:
        with pytest.raises(TypeError, match=r"with tfamp.scope\("):
            with tfamp.enable("mixed_bfloat16"):
                pass
    finally:
        tfamp.disable()


def test_a_wrapper_takes_the_name_of_an_optimizer_as_compile_does():
    optimizer = tfamp.LossScaleOptimizer("adam", initial_scale=8.0)
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    with pytest.raises(ValueError, match="adan"):
        tfamp.LossScaleOptimizer("adan")


@pytest.mark.parametrize(
    "name, format", [("model.onnx", "onnx"), ("model.tflite", "litert")]
)
def test_the_name_of_a_file_is_no_folder_for_an_export(tmp_path, name, format):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=f"'model', format='{format}'"):
        tfamp.export(model, tmp_path / name)
    assert not any(tmp_path.iterdir())


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
    "Lightning's bf16": (lambda: tfamp.enable("bf16-mixed"), "mean 'mixed_bfloat16'?"),
    "precision=": (lambda: tfamp.enable(precision="16-mixed"), "mean `policy=`?"),
    "mixed_precision=": (lambda: tfamp.scope(mixed_precision="fp16"), "`policy=`?"),
    "exclude=": (lambda: tfamp.enable(exclude=["head"]), "mean `keep_float32=`?"),
    "dtype=": (lambda: tfamp.apply(dense(), dtype="float16"), "mean `policy=`?"),
    "a model": (lambda: tfamp.enable(dense()), "expected a string: 'auto'"),
    "autocast": (lambda: tfamp.autocast(), "mean tfamp.enable?"),
    "mixed_precision": (lambda: tfamp.mixed_precision, "mean tfamp.enable?"),
    "prepare": (lambda: tfamp.prepare(dense()), "mean tfamp.enable?"),
    "GradScaler": (lambda: tfamp.GradScaler(), "mean tfamp.LossScaleOptimizer?"),
    "fit": (lambda: tfamp.fit(dense()), "mean model.fit, after tfamp.enable?"),
    "seed_everything": (lambda: tfamp.seed_everything(0), "utils.set_random_seed?"),
    "a callback of Keras": (
        lambda: tfamp.callbacks.EarlyStopping(),
        "mean keras.callbacks.EarlyStopping?",
    ),
    "a strategy": (
        lambda: tfamp.distribute.MirroredStrategy(),
        "mean tfamp.distribute.strategy?",
    ),
    "another's module": (
        lambda: tfamp.data.image_dataset_from_directory("."),
        "mean tfamp.data.Pipeline.from_images?",
    ),
    "lr_finder": (lambda: tfamp.training.lr_finder, "tfamp.training.lr_find?"),
    "validation_data=": (
        lambda: tfamp.compare(dense, (X, Y), validation_data=(X, Y)),
        "mean `validation=`?",
    ),
    "a model to compare": (lambda: tfamp.compare(dense(), (X, Y)), "Pass the function"),
    "Pipeline(x, y)": (lambda: tfamp.data.Pipeline(X, Y), "`Pipeline.from_arrays(x"),
    "from_directory": (
        lambda: tfamp.data.Pipeline.from_directory("."),
        "mean tfamp.data.Pipeline.from_images?",
    ),
    "from_tensor_slices": (
        lambda: tfamp.data.Pipeline.from_tensor_slices((X, Y)),
        "mean tfamp.data.Pipeline.from_arrays?",
    ),
    "len": (lambda: len(arrays().filter(lambda x, y: True)), "`steps_per_epoch`"),
    "element_spec": (lambda: arrays().element_spec, "pipeline.build().element_spec"),
    "num_parallel_calls=": (
        lambda: arrays().map(lambda x, y: (x, y), num_parallel_calls=4),
        "expected `function`. Leave it out.",
    ),
}


@pytest.mark.parametrize("guess", ANSWERED)
def test_a_guess_is_answered_in_one_line_with_what_to_write(guess):
    call, meant = ANSWERED[guess]
    kinds = (AttributeError, TypeError, ValueError)
    with pytest.raises(kinds, match=re.escape(meant)) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not tfamp.status().enabled


@pytest.mark.parametrize("save", ["h5", "folder"])
def test_a_model_of_another_format_says_how_it_is_loaded(save, tmp_path):
    model, path = dense(), tmp_path / "model.h5"
    if save == "h5":
        model.save(path)
    else:
        path.mkdir()
    with pytest.raises(ValueError, match="load them with Keras and call `tfamp.apply"):
        tfamp.load_model(path)


def test_what_is_written_as_in_keras_works(capsys):
    tfamp.disable()
    tfamp.disable()
    with tfamp.scope("mixed_bfloat16"):
        model = dense()
        model.summary()
    assert "Total params" in capsys.readouterr().out
    pipeline = arrays().shuffle(100).batch(batch_size=4).repeat(2).take(3)
    assert pipeline and len(list(pipeline)) == 3
    x, y = next(iter(pipeline))
    assert x.shape == (4, 2)
    history = model.fit(pipeline, validation_data=arrays().batch(4), verbose=0)
    assert np.isfinite(history.history["val_loss"][0])
    assert tfamp.lint(model, (X, Y)) is not None
