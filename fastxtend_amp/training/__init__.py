"Training: the callback, fastai's loop, loss scaling, files, optimizers, and the methods of `Learner`."
