"""Runs a model's step outside `fit`, and puts everything back."""
