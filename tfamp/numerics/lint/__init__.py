"""Lint: rules that read a model, its traced graph and its data, and run no step."""
