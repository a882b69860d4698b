"Commands: the demo and the benchmark."
