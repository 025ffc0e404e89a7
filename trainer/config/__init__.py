"""The configuration tree of a run, its overrides on the command line, and recipes by name."""
