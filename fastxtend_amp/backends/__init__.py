"Support for FSDP2 and XLA, in training and in files."
