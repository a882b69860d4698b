"Exports everything: `from fastxtend_amp.all import *`, in the manner of fastai's libraries."
from . import *  # noqa: F403
from . import __all__  # noqa: F401
