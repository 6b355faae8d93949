"""A layer that makes a model's output and is used inside another layer as well."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tests.wild.checking import made


class Embedded(layers.Layer):
    """Tokens and their positions, added up by a plain sum."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(12, 8)
        self.positions = layers.Embedding(4, 8)

    def call(self, ids):
        return self.tokens(ids) + self.positions(np.arange(4))[None]


class MaskedHead(layers.Layer):
    """Holds the embedding of another layer for its last product."""

    def __init__(self, embedding):
        super().__init__()
        self.dense = layers.Dense(8, "gelu")
        self.embedding = embedding

    def call(self, hidden):
        table = keras.ops.transpose(self.embedding.embeddings)
        return keras.ops.matmul(self.dense(hidden), table)


@pytest.mark.quick("mixed_bfloat16-apply")
@pytest.mark.parametrize("way", ["enable", "apply"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_a_head_that_holds_the_embedding_of_another_layer(way, policy):
    def make():
        ids = keras.Input((4,), dtype="int32")
        embedded = Embedded()
        backbone = keras.Model(ids, layers.Dense(8)(embedded(ids)))
        return keras.Model(ids, MaskedHead(embedded.tokens)(backbone(ids)))

    model = made(make, way, policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    ids = np.arange(12).reshape(3, 4)
    assert np.isfinite(model.fit(ids, ids, verbose=0).history["loss"]).all()
    assert model.predict(ids, verbose=0).dtype == "float32"
    rows = {row.class_name: row for row in tfamp.assignment(model).layers}
    assert rows["MaskedHead"].compute_dtype == "float32"
    assert rows["Embedded"].compute_dtype == policy.removeprefix("mixed_")
    # No error had to be caught for it.
    rules = [row.rule for row in rows.values()]
    assert "default: cannot run in half precision" not in rules
