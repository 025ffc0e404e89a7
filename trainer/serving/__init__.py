"""From a checkpoint to predictions: scores of logs, a model in one process, exports, a service.

May import everything of trainer below the loop; pyarrow where rows come in or go out, fastapi in
the service.
"""

from trainer.serving.scorer import Scorer as Scorer
