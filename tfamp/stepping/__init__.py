"""Runs a model's step outside `fit`, and puts everything back."""

import threading

# Held by whoever changes for a block what all threads of the process share.
ALONE = threading.RLock()
