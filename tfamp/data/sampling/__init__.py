"""Which examples an epoch takes: balanced, weighted, or a part of them."""
