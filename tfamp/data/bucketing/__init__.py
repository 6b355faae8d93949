"""Batches of sequences: little padding, few shapes."""

from tfamp.data.bucketing.make import make_bucket as make_bucket
