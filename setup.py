"Build script: everything that describes the package is read from settings.ini beside this file."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser(delimiters=['='])
config.read(here / 'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], author=cfg['author'],
    license=cfg['license'], keywords=cfg['keywords'], python_requires='>=' + cfg['min_python'],
    classifiers=cfg['classifiers'].split('; '),
    long_description=(here / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    package_data={cfg['lib_name']: ['py.typed']},
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('dev', 'docs', 'kahan', 'fp8', 'bench')},
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
