"""Filters of elements: rules, shapes, outliers, and how many each one drops."""
