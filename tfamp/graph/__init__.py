"""Reads traced graphs: operations, products, casts, sizes, what lives when."""
