"""An error for learners that versions 0.3 and 0.4 pickled with a precision: their classes are gone.

Importing this file adds a finder to `sys.meta_path`, which raises it when one of their modules is imported. Files of
`Learner.save`, and 0.4's files of `Learner.export`, name no class of this package: they load. `tests/files/` has both.
"""
from __future__ import annotations

import sys

# Unpickling imports one of these before any other.
_FORMER = ['fastxtend_amp.callback', 'fastxtend_amp.half_weights', 'fastxtend_amp.metrics']


class _FormerModules:
    "A finder that finds nothing."
    @staticmethod
    def find_spec(name: str, *args: object) -> None:
        "Raise a `RuntimeError` for a module of these versions."
        if name in _FORMER:
            raise RuntimeError(f'{name} is a module of fastxtend_amp 0.3 and 0.4. A learner that they pickled with a '
                               'precision cannot be loaded.\nLoad it with the version that wrote it, call '
                               "`learn.to_fp32()` and then `learn.export('model.pkl')`: that file loads in every "
                               'version. Files of `learn.save` do as well.')


sys.meta_path.append(_FormerModules)
