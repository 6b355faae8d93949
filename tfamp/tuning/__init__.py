"""Chooses policies and layers' dtypes by measuring the user's own model."""
