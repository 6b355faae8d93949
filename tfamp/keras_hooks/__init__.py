"""Every touch of Keras's private modules, a file for each part of Keras.

Each file has `patches(...)`, which returns what it replaces; nothing is
replaced at import. What to decide is handed in from above: a file here knows
Keras, not the rules. Checked against Keras 3.10.0 and 3.15.1.
"""
