"""The three full-rank towers, each next to its equations."""
