"What FSDP2 and XLA need for training and in files. Nothing imports these files but the package itself."
