"Support for FSDP2 and XLA, in training and in files. Only the package itself imports these files."
