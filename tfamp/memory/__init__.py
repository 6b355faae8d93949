"""Memory: what a step will hold, the batch that fits, activations computed again."""
