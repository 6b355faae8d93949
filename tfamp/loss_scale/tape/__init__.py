"""The gradient tape, which scales gradients and gives true ones back."""
