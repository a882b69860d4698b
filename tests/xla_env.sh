#!/usr/bin/env bash
# Build an environment with torch_xla in FOLDER (about 8 GB; it is used again if it is there) and run the tests in it,
# test_xla.py included, on XLA's CPU device:
#     tests/xla_env.sh FOLDER [arguments for pytest]
# torch_xla has wheels for Linux alone, each for one version of torch. A device other than the CPU: PJRT_DEVICE=TPU.
set -euo pipefail
folder=${1:?usage: tests/xla_env.sh FOLDER [arguments for pytest]}; shift
cd "$(dirname "$0")/.."
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check torch==2.9.0 torch_xla==2.9.0 torchvision==0.24.0 -e ".[dev]"
PJRT_DEVICE=${PJRT_DEVICE:-CPU} "$folder/bin/python" -m pytest "${@:-tests}"
