"Benchmark of training steps in each precision: `python -m nbs.benchmarks --help`, from a clone."
