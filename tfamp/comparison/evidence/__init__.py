"""From measurements to a verdict, and how sure it is."""
