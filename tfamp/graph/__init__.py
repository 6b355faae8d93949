"""Reads the operations that a traced function runs, those in its functions too."""

from tfamp.graph.products import read_operations as read_operations
