"Build script: everything that describes the package is read from settings.ini beside this file."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser(delimiters=['='])
config.read(here / 'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
url = cfg['url'].rstrip('/')


def description(text):
    "Return README for a package index: with absolute addresses, or, without one of the repository, without pictures."
    link, source = r'(?<!!)\[([^]]*)\]\((?!https?:)([^)]*)\)', r'nbs/[\w/.]+\.png'
    if url: return re.sub(source, rf'{url}/raw/main/\g<0>', re.sub(link, rf'[\1]({url}/blob/main/\2)', text))
    return re.sub(link, r'\1', re.sub(r'<picture>.*?</picture>\n\n|^!\[[^\n]*\n', '', text, flags=re.S | re.M))


pages = {'Source': '', 'Issues': '/issues', 'Documentation': '/blob/main/README.md#manual',
         'Changelog': '/blob/main/CHANGELOG.md'}
setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], author=cfg['author'],
    license_expression=cfg['license'], keywords=cfg['keywords'], python_requires='>=' + cfg['min_python'],
    classifiers=cfg['classifiers'].split('; '),
    long_description=description((here / 'README.md').read_text(encoding='utf-8')),
    long_description_content_type='text/markdown',
    project_urls={name: url + path for name, path in pages.items()} if url else {},
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    package_data={cfg['lib_name']: ['py.typed']},
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('dev', 'docs', 'kahan', 'fp8', 'bench')},
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
