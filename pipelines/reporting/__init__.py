"""The HTML report of runs and nights."""
