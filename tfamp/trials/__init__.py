"""Runs in fresh processes, in turns, and what they tell."""
