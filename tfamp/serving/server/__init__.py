"""`tfamp serve`: exported models behind HTTP, in the protocols that clients speak."""
