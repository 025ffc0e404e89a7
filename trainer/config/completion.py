# SPDX-License-Identifier: MIT
"""Shell completion for training: recipes, settings, files.

`python -m` has no completion of its own, so the script defines a command, `fullrank-train`, that is
the same as `python -m trainer.train`, and completes that:

  source <(python -m trainer.train --completion)
"""

from __future__ import annotations

from trainer.config.config import recipes
from trainer.config.overrides import setting_names

_SCRIPT = """\
# bash, and zsh after `autoload -U +X bashcompinit && bashcompinit`
fullrank-train() {{ python -m trainer.train "$@"; }}
_fullrank_train() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{recipes}" -- "$word"))
  elif [ "${{word#--}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "{settings}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _fullrank_train fullrank-train"""


def completion_script() -> str:
    """Return a script for bash that completes recipes and the settings of any of them."""
    known = recipes()
    settings = {"--output", "--help", "--help-all"}
    for build in known.values():
        settings |= set(setting_names(build()))
    return _SCRIPT.format(recipes=" ".join(known), settings=" ".join(sorted(settings)))
