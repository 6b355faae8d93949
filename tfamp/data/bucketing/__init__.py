"""Batches of sequences: little padding, few shapes."""
