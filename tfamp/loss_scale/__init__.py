"""The loss scale: its rule, the optimizer that applies it, its hooks in `fit`."""
