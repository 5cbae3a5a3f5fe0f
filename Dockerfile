# Two images from one file. On a CPU:  docker build --target cpu -t farthing:cpu .
#                          With CUDA:  docker build --target cuda -t farthing:cuda .
# Versions are those of constraints.txt, which are the ones that the tests run with.
FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src

FROM base AS cpu
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt .
WORKDIR /work
ENTRYPOINT ["farthing"]

# torch's wheels from the package index bring their CUDA with them; the host needs the driver alone
FROM base AS cuda
RUN pip install -c constraints.txt '.[gpu]'
WORKDIR /work
ENTRYPOINT ["farthing"]
