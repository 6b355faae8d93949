"""Input pipelines: `tfamp.data.Pipeline` in, a plain `tf.data.Dataset` out."""

from tfamp.data.pipeline import Pipeline as Pipeline
