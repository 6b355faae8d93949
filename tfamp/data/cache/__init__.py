"""Caches of elements: in memory, and in files that are whole or not there."""
