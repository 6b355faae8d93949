"""What users of Keras and tf.data write without looking it up works, or says how."""

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
