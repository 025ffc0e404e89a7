"""Starting a run from the state of earlier runs, group by group."""
