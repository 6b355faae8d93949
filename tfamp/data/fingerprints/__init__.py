"""What of a Python value is put into a fingerprint, by kind of value."""
