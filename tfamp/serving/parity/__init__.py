"""The gate: an exported model against the float32 one it came from."""
