"What a device is: facts, how it multiplies fp32 tensors, what work on it costs, and the rules of CUDA's autocast."
