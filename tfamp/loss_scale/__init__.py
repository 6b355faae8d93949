"""The loss scale: its rule, the optimizer that applies it, and its care in `fit`."""
