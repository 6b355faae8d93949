"""Exported models run: one file a runtime, one way to ask any of them."""
