"""`tfamp.remat`: activations computed again in the backward pass."""
