# SPDX-License-Identifier: Apache-2.0
# NVIDIA's Triton image with torch, transformers and hf_triton. Model folders are mounted at run time, not copied:
#
#   docker build -t triton_transformer_server .
#
# Its own command serves model_repository with stream doors and OpenAI's API on port 9000; `tritonserver ...` runs the
# server alone, and `hf-triton openai --triton HOST:8001 --host 0.0.0.0` the gateway alone, for which deploy/gateway/Dockerfile
# has a small image.
#
# For a model that needs an unreleased transformers:
#
#   docker build -t triton_transformer_server \
#     --build-arg TRANSFORMERS=git+https://github.com/huggingface/transformers.git .
ARG BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.11-py3
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

# Prompts are UTF-8 regardless of the host's locale; logs are not buffered.
ENV LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1

# What Triton's language compiles a kernel's launcher with, at its first use on a GPU.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /tmp/hf_triton

# Each package is a wheel whose hash `make lock` has written down. torch and what comes with it is by far the largest
# layer; only a change of it rebuilds that. A build of torch from elsewhere: --build-arg TORCH=torch==...
ARG TORCH="--no-deps --require-hashes --only-binary=:all: --requirement requirements-torch.txt"
COPY requirements-torch.txt ./
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir ${TORCH}

# The library's other dependencies, and what builds it.
COPY requirements-image.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary=:all: --requirement requirements-image.txt

# A pip requirement; empty keeps the pinned version. Only torch and numpy stay pinned with it, because a newer
# transformers may need newer versions of its other dependencies.
ARG TRANSFORMERS=
COPY constraints.txt ./
RUN if [ -n "${TRANSFORMERS}" ]; then \
      grep -E '^(numpy|torch)==' constraints.txt > /tmp/kept.txt \
      && pip install --no-cache-dir --constraint /tmp/kept.txt "${TRANSFORMERS}" \
      && rm /tmp/kept.txt; \
    fi

COPY . ./
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# Kernels of the Hub for checkpoints in blocks of FP8 and in MXFP4 (docs/quantisation.md), by the names of such models:
# --build-arg KERNELS="Qwen/Qwen3-8B-FP8". Their commits are those of kernels.lock beside this file; without one, the
# newest are taken and printed. A load fetches none.
ARG KERNELS=
ENV KERNELS_CACHE=/opt/hf_triton/kernels
# hadolint ignore=SC2086
RUN if [ -n "${KERNELS}" ]; then \
      mkdir -p "${KERNELS_CACHE}" && { [ ! -f kernels.lock ] || cp kernels.lock "${KERNELS_CACHE}"; } \
      && pip install --no-cache-dir --no-build-isolation --constraint constraints.txt '.[kernels]' \
      && HF_HOME=/tmp/hf_home hf-triton pull --kernels ${KERNELS} && cat "${KERNELS_CACHE}/kernels.lock" \
      && rm -rf /tmp/hf_home; \
    fi \
    && rm -rf /tmp/hf_triton

# NVIDIA's image has an unprivileged user with id 1000 and no home. Its home is world-writable like /tmp, so that
# `--user "$(id -u):$(id -g)"` works too. The link makes mounts at /root/.cache/huggingface, as in Triton's tutorial,
# visible in that home. The cache itself is not created here: without one, downloads go to the mounted model folder and
# survive the container.
ENV HOME=/home/triton-server
RUN if ! getent passwd 1000; then useradd --uid 1000 --no-create-home triton-server; fi \
    && mkdir -p "${HOME}/.cache" && chmod 1777 "${HOME}" "${HOME}/.cache" \
    && rm -rf /root/.cache && ln -s "${HOME}/.cache" /root/.cache

# Compiled kernels are in the cache too. On a GPU, freed memory serves allocations of any size.
ENV TRITON_CACHE_DIR=${HOME}/.cache/triton PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

USER 1000:1000

# Relative paths (`model_repository`) start here. The entrypoint is NVIDIA's.
WORKDIR /opt/tritonserver
EXPOSE 8000 8001 8002 9000
CMD ["hf-triton", "serve", "model_repository", "--host", "0.0.0.0", "--exit-on-error", "--verbose"]

# The first start may download for a long time, which does not make the container unhealthy. A container with the
# gateway alone is healthy if its Triton is ready.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["sh", "-c", "export NO_PROXY='*'; \
      curl -fsS http://localhost:8000/v2/health/ready || curl -fsS http://localhost:9000/health \
      || curl -fsSk https://localhost:9000/health"]
