"The benchmark: training steps in each precision, timed and counted side by side."
from .command import main
from .plot import plot
from .run import bench, read_figures
from .tables import tables

__all__ = ['bench', 'main', 'plot', 'read_figures', 'tables']
