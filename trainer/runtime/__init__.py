"""The processes of a run and their surroundings: ranks, signals, files, memory."""
