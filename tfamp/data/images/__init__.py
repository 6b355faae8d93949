"""Images: read, decoded, cut into pieces, brought to a range."""
