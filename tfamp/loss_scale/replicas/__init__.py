"""Several replicas train as one: their gradients, statistics and shares of a batch."""
