# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# vLLM's official image with the series landed in it: docker build -t vllm-channels .
# Never built by `make test`, which runs these same lines on an installed vLLM.
FROM vllm/vllm-openai:v0.28.0
RUN --mount=type=bind,target=/series,readwrite <<EOT
set -eu
cd /series
python3 -m pip install -q --target /tmp/tools -c constraints.txt libcst packaging ruff
PYTHONPATH=/tmp/tools python3 -m series land "$(python3 -m series.environment)"
rm -rf /tmp/tools
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q 'vllm[b12x]'
python3 -m series.installed
EOT
