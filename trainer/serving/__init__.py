"""From a checkpoint to predictions: scores of logs, a model in one process, exported models.

May import everything of trainer below the loop; pyarrow where rows come in or go out.
"""

from trainer.serving.scorer import Scorer as Scorer
