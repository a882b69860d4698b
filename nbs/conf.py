"Settings of the web page: `python -m sphinx -W -b html nbs nbs/_build/html` builds it."
import sys
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]   # the extensions, and the package that this page describes

settings = ConfigParser(delimiters=['='])
settings.read(HERE.parent / 'settings.ini', encoding='utf-8')

project = settings['DEFAULT']['lib_name']
author = copyright = settings['DEFAULT']['author']
release = version = settings['DEFAULT']['version']

extensions = ['myst_nb', 'sphinx_copybutton', 'website', 'breaks', 'search_words']
exclude_patterns = ['_build', '**.ipynb_checkpoints', 'benchmarks/__pycache__']
nb_execution_mode = 'off'                      # outputs are stored in the notebooks; `nbs/run.py` makes them
nb_merge_streams = True
myst_heading_anchors = 4
highlight_language = 'text'                    # what is Python says so; the rest is for a shell
smartquotes = False                            # 'fp16' is code, also where it stands in a sentence
suppress_warnings = ['mystnb.unknown_mime_type']
copybutton_exclude = '.linenos, .gp, .go'

html_theme = 'furo'
pygments_style, pygments_dark_style = 'friendly', 'github-dark'
html_title = f'{project} {release}'
html_static_path = ['_static']
html_css_files = ['custom.css']
html_show_sphinx = html_show_copyright = False
html_show_sourcelink = html_use_index = False  # `llms.txt` links to the Markdown
html_theme_options = {'navigation_with_keys': True}
if url := settings['DEFAULT']['url']:           # the page's links to the repository
    html_theme_options |= {'source_repository': url, 'source_branch': 'main', 'source_directory': 'nbs/'}
