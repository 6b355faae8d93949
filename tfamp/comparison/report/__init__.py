"""Reports of comparisons: HTML, Markdown, text."""
