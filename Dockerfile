# SPDX-License-Identifier: Apache-2.0
# NVIDIA's Triton image plus torch, transformers and hf_triton. Model folders are mounted when it runs, not copied:
#
#   docker build -t triton_transformer_server .
#
# A model that only the newest transformers knows ("day zero"):
#
#   docker build -t triton_transformer_server \
#     --build-arg TRANSFORMERS=git+https://github.com/huggingface/transformers.git .
ARG BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.07-py3
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

# Prompts are UTF-8 whatever the host's locale; logs appear at once.
ENV LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1

WORKDIR /tmp/hf_triton

# torch is by far the largest layer, and only a change of the pinned versions builds it anew.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch

# What the library depends on, without the library: an empty package of the same name stands in for it.
COPY pyproject.toml ./
RUN mkdir hf_triton && touch README.md LICENSE hf_triton/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt '.[cpu]'

# Any pip requirement; empty keeps the pinned version. Only torch and numpy stay pinned beside it, because a newer
# transformers may want newer versions of everything else.
ARG TRANSFORMERS=
RUN if [ -n "${TRANSFORMERS}" ]; then \
      grep -E '^(numpy|torch)==' constraints.txt > /tmp/kept.txt \
      && pip install --no-cache-dir --constraint /tmp/kept.txt "${TRANSFORMERS}" \
      && rm /tmp/kept.txt; \
    fi

COPY . ./
RUN pip install --no-cache-dir --no-deps . && rm -rf /tmp/hf_triton

# NVIDIA's image has a user for this, number 1000, without a home. The home is open like /tmp, so that
# `--user "$(id -u):$(id -g)"` works too. The link leads mounts at /root/.cache/huggingface, where Triton's tutorial has
# them, to the cache that is read. That cache is not made here: while there is none, downloads go into the mounted model
# folder, where they outlive the container.
ENV HOME=/home/triton-server
RUN if ! getent passwd 1000; then useradd --uid 1000 --no-create-home triton-server; fi \
    && mkdir -p "${HOME}/.cache" && chmod 1777 "${HOME}" "${HOME}/.cache" \
    && rm -rf /root/.cache && ln -s "${HOME}/.cache" /root/.cache
USER 1000:1000

# Relative paths (`--model-repository=model_repository`) begin here. The entrypoint is NVIDIA's own.
WORKDIR /opt/tritonserver
CMD ["tritonserver", "--model-repository=model_repository"]

# The first start may download for a long time; that is not ill health.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["curl", "--fail", "--silent", "--show-error", "http://localhost:8000/v2/health/ready"]
