"""Generated click logs with a known best AUC."""
