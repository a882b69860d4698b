"Everything that fastxtend_amp exports, as fastai's own libraries have it: `from fastxtend_amp.all import *`."
from . import *  # noqa: F403
from . import __all__  # noqa: F401
