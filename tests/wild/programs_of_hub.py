"""Backbones and tasks of KerasHub with random weights, two layers each."""

import keras
import numpy as np
from keras_hub import models

from tests.wild.programs.registry import Trained, program

FIELD = "KerasHub"
VOCABULARY = 24
LENGTH = 8


def tokens(n=32):
    """Returns token ids without padding."""
    return np.random.RandomState(0).randint(3, VOCABULARY, (n, LENGTH))


def encoded(n=32, **extra):
    ids = tokens(n)
    return {"token_ids": ids, "padding_mask": np.ones_like(ids), **extra}


def fit(model, x, y, loss, rate=0.01, epochs=3):
    """Compiles and trains; returns the loss of each epoch."""
    model.compile(keras.optimizers.Adam(rate), loss)
    return model.fit(x, y, batch_size=16, epochs=epochs, verbose=0).history["loss"]


def from_logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def small(**options):
    return {
        "vocabulary_size": VOCABULARY,
        "num_layers": 2,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        **options,
    }


@program(FIELD, "backbone under a new head")
def bert():
    x = encoded(segment_ids=np.zeros((32, LENGTH), "int32"))
    y = (x["token_ids"][:, 0] > 12).astype("int32")
    backbone = models.BertBackbone(
        **small(num_heads=2, max_sequence_length=LENGTH, dropout=0.0)
    )
    h = keras.layers.Dense(2)(backbone.output["pooled_output"])
    model = keras.Model(backbone.input, h)
    yield model
    losses = fit(model, x, y, from_logits())
    yield Trained(losses, model, {k: v[:2] for k, v in x.items()})


@program(FIELD, "task, head tied to the embedding")
def distil_bert_masked_lm():
    backbone = models.DistilBertBackbone(
        **small(num_heads=2, max_sequence_length=LENGTH, dropout=0.0)
    )
    model = models.DistilBertMaskedLM(backbone, preprocessor=None)
    yield model
    x = encoded(mask_positions=np.tile(np.arange(2), (32, 1)))
    losses = fit(model, x, x["token_ids"][:, :2], from_logits())
    yield Trained(losses, model, {k: v[:2] for k, v in x.items()})


def causal(model):
    """Trains a language model and lets it go on by itself, always the likeliest."""
    x = encoded()
    losses = fit(model, x, np.roll(x["token_ids"], -1, axis=1), from_logits())
    prompt = encoded(2)
    prompt["padding_mask"] = np.arange(LENGTH)[None, :] < np.array([[3], [4]])
    prompt["token_ids"] = prompt["token_ids"] * prompt["padding_mask"]
    model.compile(sampler="greedy")
    generated = model.generate(prompt, stop_token_ids=None)
    answers = {"tokens": np.asarray(generated["token_ids"])}
    return Trained(losses, model, {k: v[:2] for k, v in x.items()}, answers)


@program(FIELD, "task with generate")
def gpt2():
    backbone = models.GPT2Backbone(
        **small(num_heads=2, max_sequence_length=LENGTH, dropout=0.0)
    )
    model = models.GPT2CausalLM(backbone, preprocessor=None)
    yield model
    yield causal(model)


@program(FIELD, "task with generate")
def llama():
    backbone = models.LlamaBackbone(**small(num_query_heads=2, num_key_value_heads=1))
    model = models.LlamaCausalLM(backbone, preprocessor=None)
    yield model
    yield causal(model)


@program(FIELD, "task with generate, head tied to the embedding")
def gemma():
    backbone = models.GemmaBackbone(
        **small(num_query_heads=2, num_key_value_heads=1, head_dim=8)
    )
    model = models.GemmaCausalLM(backbone, preprocessor=None)
    yield model
    yield causal(model)


@program(FIELD, "task over images")
def vit():
    x = np.random.RandomState(0).uniform(size=(16, 8, 8, 3)).astype("float32")
    y = (x.mean(axis=(1, 2, 3)) > 0.5).astype("int32")
    backbone = models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    )
    model = models.ViTImageClassifier(backbone, num_classes=2, preprocessor=None)
    yield model
    losses = fit(model, x, y, from_logits(), rate=0.002, epochs=15)
    yield Trained(losses, model, x[:2])


@program(FIELD, "backbone of an encoder and a decoder")
def whisper():
    random = np.random.RandomState(0)
    ids = tokens(8)
    x = {
        "encoder_features": random.normal(size=(8, 16, 8)).astype("float32"),
        "decoder_token_ids": ids,
        "decoder_padding_mask": np.ones_like(ids),
    }
    backbone = models.WhisperBackbone(
        **small(
            num_heads=2,
            num_mels=8,
            max_encoder_sequence_length=16,
            max_decoder_sequence_length=LENGTH,
            dropout=0.0,
        )
    )
    h = keras.layers.Dense(VOCABULARY)(backbone.output["decoder_sequence_output"])
    model = keras.Model(backbone.input, h)
    yield model
    losses = fit(model, x, np.roll(ids, -1, axis=1), from_logits())
    yield Trained(losses, model, {k: v[:2] for k, v in x.items()})
