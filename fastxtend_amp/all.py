"Everything that fastxtend_amp exports, as fastai's own libraries have it: `from fastxtend_amp.all import *`."
from . import *
from . import __all__
