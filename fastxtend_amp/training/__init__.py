"Training: the callback, fastai's loop, loss scaling, files, metrics, optimizers, and the methods of `Learner`."
