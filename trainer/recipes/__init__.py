"""Named runs. Each recipe is a function whose docstring gives command, cost and expected metric."""
