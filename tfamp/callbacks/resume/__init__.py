"""`Resume`: training that goes on where it was, to the bit."""
