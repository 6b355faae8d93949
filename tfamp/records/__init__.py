"""What everything is told in: records, findings, formats, units, files."""
