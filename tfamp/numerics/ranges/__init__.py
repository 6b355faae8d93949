"""`tfamp.ranges`: how large the numbers of each layer are."""
