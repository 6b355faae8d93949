"""Models that only predict: frozen in half precision."""
