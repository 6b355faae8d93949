"""The `tfamp` command: one file a subcommand."""
