"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

__all__: list[str] = []

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights


# -- insight


# -- devices


# -- tools
