"""The dtype of each layer, and why: rules, heads, what stays float32 inside."""
