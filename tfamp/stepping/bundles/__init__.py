"""Bundles: a failing training step in a folder, with all that replaying it takes."""
