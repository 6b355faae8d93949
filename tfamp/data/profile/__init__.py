"""Reads training data of any form, and profiles its columns in one pass."""
