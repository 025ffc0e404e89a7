# SPDX-License-Identifier: MIT
"""Shell completion: commands, recipes, settings, files.

The script completes the installed command `fullrank`. It also defines `fullrank-train`, which is
`python -m trainer.train`, since `python -m` has no completion of its own:

  source <(python -m trainer.train --completion)

tyro can print a completion script too (`--tyro-print-completion`), for one configuration at a time:
a script for all recipes would need a sub-command for each, and torch to build them.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.names import names

_SCRIPT = """\
# bash, and zsh after `autoload -U +X bashcompinit && bashcompinit`
fullrank-train() {{ python -m trainer.train "$@"; }}
_fullrank() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" recipe_at=1
  if [ "${{COMP_WORDS[0]##*/}}" = fullrank ]; then
    if [ "$COMP_CWORD" -eq 1 ]; then
      COMPREPLY=($(compgen -W "{commands}" -- "$word"))
      return
    fi
    case "${{COMP_WORDS[1]}}" in
      train|plan) recipe_at=2 ;;
      *) recipe_at=0 ;;
    esac
  fi
  if [ "$COMP_CWORD" -eq "$recipe_at" ]; then
    COMPREPLY=($(compgen -W "{recipes}" -- "$word"))
  elif [ "$recipe_at" -gt 0 ] && [ "${{word#--}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "{settings}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _fullrank fullrank fullrank-train"""


def completion_script(commands: Iterable[str] = ()) -> str:
    """Return a script for bash that completes recipes and the settings of any of them.

    Args:
        commands: of the installed command, where it is there.
    """
    known = names()
    settings = sorted({"--output", "--help", "--help-all", *known.all_settings()})
    return _SCRIPT.format(
        commands=" ".join(commands), recipes=" ".join(known.recipes), settings=" ".join(settings)
    )
