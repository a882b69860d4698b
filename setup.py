"Build script: everything that describes the package is read from settings.ini beside this file."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup


def readable_elsewhere(text, address):
    "The README for PyPI: links and pictures that point into the repository get its address."
    text = re.sub(r'(!\[[^]]*\]\()(?!https?:)', rf'\g<1>{address}/raw/main/', text)
    return re.sub(r'(\]\()(?!https?:|#)', rf'\g<1>{address}/blob/main/', text)


here = Path(__file__).resolve().parent
config = ConfigParser(delimiters=['='])
config.read(here / 'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
repository = cfg['git_url']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], author=cfg['author'],
    license=cfg['license'], keywords=cfg['keywords'], python_requires='>=' + cfg['min_python'],
    url=repository, classifiers=cfg['classifiers'].split('; '),
    project_urls={'Documentation': cfg['doc_url'], 'Source': repository, 'Issues': f'{repository}/issues',
                  'Changelog': f'{repository}/blob/main/CHANGELOG.md'},
    long_description=readable_elsewhere((here / 'README.md').read_text(encoding='utf-8'), repository),
    long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    package_data={cfg['lib_name']: ['py.typed']},
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('dev', 'docs', 'kahan')},
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
