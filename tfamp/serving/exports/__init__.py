"""Models leave as files of other runtimes: one file a format, all behind one call."""
