"""What stands around `fit`, `evaluate` and `predict` of a managed model."""
