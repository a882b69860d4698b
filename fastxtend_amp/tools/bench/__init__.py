"The benchmark: training steps in each precision, timed and counted side by side."
from .bench import main

__all__ = ['main']
