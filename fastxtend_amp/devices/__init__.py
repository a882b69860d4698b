"Facts about devices: how they multiply fp32 tensors, what work on them costs, and the rules of CUDA's autocast."
