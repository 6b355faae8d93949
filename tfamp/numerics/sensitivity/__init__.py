"""`tfamp.sensitivity`: which layers low precision would spoil."""
