"""Models whose constructor wires a Functional graph, as in KerasHub, saved and loaded.

The operations of such a graph are no layers: they keep the dtypes of the tensors that
they met when the constructor ran, and it runs again when a file is loaded.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfamp
from tests.wild.checking import by_file, by_stock_file

TOKENS = np.arange(24).reshape(4, 6) % 17


@keras.saving.register_keras_serializable("constructor_graphs")
class ReversibleEmbedding(layers.Embedding):
    def call(self, inputs, reverse=False):
        if not reverse:
            return super().call(inputs)
        return ops.matmul(
            inputs, ops.transpose(ops.cast(self.embeddings, inputs.dtype))
        )

    def compute_output_spec(self, inputs, reverse=False):
        width = self.input_dim if reverse else self.output_dim
        shape = (*(inputs.shape[:-1] if reverse else inputs.shape), width)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)


@keras.saving.register_keras_serializable("constructor_graphs")
class Backbone(keras.Model):
    def __init__(self, vocabulary=17, width=8, dtype=None, **kwargs):
        self.token_embedding = ReversibleEmbedding(vocabulary, width, dtype=dtype)
        tokens = keras.Input((None,), dtype="int32")
        x = self.token_embedding(tokens)
        x = x * ops.cast(ops.sqrt(float(width)), x.dtype)
        hidden = layers.LayerNormalization(dtype=dtype)(x)
        x = x + layers.Dense(width, activation="gelu", dtype=dtype)(hidden)
        x = layers.LayerNormalization(dtype=dtype)(x)
        super().__init__(inputs=tokens, outputs=x, dtype=dtype, **kwargs)

    def get_config(self):
        return {
            "name": self.name,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
        }


class WithBackbone:
    def get_config(self):
        return {"name": self.name, "backbone": keras.layers.serialize(self.backbone)}

    @classmethod
    def from_config(cls, config):
        backbone = keras.layers.deserialize(config["backbone"])
        return cls(**{**config, "backbone": backbone})


@keras.saving.register_keras_serializable("constructor_graphs")
class LanguageModel(WithBackbone, keras.Model):
    def __init__(self, backbone, **kwargs):
        self.backbone = backbone
        hidden = backbone(backbone.input)
        logits = backbone.token_embedding(hidden, reverse=True)
        super().__init__(inputs=backbone.input, outputs=logits, **kwargs)


@keras.saving.register_keras_serializable("constructor_graphs")
class Classifier(WithBackbone, keras.Model):
    def __init__(self, backbone, **kwargs):
        super().__init__(**kwargs)
        self.backbone = backbone
        self.norm = layers.UnitNormalization()
        self.mix = layers.Dense(8)
        self.head = layers.Dense(2)

    def call(self, tokens):
        x = self.backbone(tokens)
        return self.head(x + self.norm(self.mix(x)))


MODELS = {
    "tied head": lambda: LanguageModel(Backbone()),
    "inside a subclass": lambda: Classifier(Backbone()),
}
POLICIES = ("mixed_float16", "mixed_bfloat16")
MADE_UNDER = {
    "enable": lambda policy: policy,
    "apply": lambda _: "float32",
    "apply to enabled": lambda policy: POLICIES[policy == POLICIES[0]],
}


def made(name, way, policy):
    with tfamp.scope(MADE_UNDER[way](policy)):
        model = MODELS[name]()
        model(TOKENS)
    if way != "enable":
        tfamp.apply(model, policy)
    model.compile("sgd", "mse")
    return model


def facts(model):
    return [tuple(vars(row).values())[1:] for row in tfamp.assignment(model)]


def assert_same(loaded, model):
    assert facts(loaded) == facts(model)
    np.testing.assert_array_equal(loaded(TOKENS), model(TOKENS))
    assert loaded(TOKENS).dtype == "float32"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", MADE_UNDER)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick("tied head-*")
def test_predictions_are_the_same_after_loading(name, way, policy, tmp_path):
    model = made(name, way, policy)
    loaded = by_file(model, tmp_path)
    assert_same(loaded, model)
    assert_same(by_file(loaded, tmp_path), model)
    assert not tfamp.status().enabled
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.quick("tied head-mixed_bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_keras_own_loading_under_the_same_policy_gives_the_same(name, policy, tmp_path):
    model = made(name, "enable", policy)
    with tfamp.scope(policy):
        assert_same(by_stock_file(model, tmp_path), model)
