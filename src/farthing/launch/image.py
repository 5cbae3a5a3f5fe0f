"""The image of a rented machine: a Dockerfile that builds from farthing's own pinned requirements."""

from __future__ import annotations

import farthing

PLAIN = "pytorch/pytorch:2.10.0-cuda12.8-cudnn9-runtime"
"""What is used where no image is named: most hosts have it, and farthing is installed on top."""


def dockerfile() -> str:
    """Text of a Dockerfile, to be built at the root of farthing's repository."""
    return f"""\
# farthing {farthing.__version__}: docker build --tag IMAGE --file THIS_FILE ROOT_OF_THE_REPOSITORY && docker push IMAGE
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# constraints.txt names versions; a local build of torch (+cpu) in it is left out, so that the one for CUDA is taken
RUN sed 's/+cpu$//' constraints.txt > /tmp/constraints.txt \\
 && pip install --no-cache-dir --constraint /tmp/constraints.txt '.[gpu,s3,gcs]'
ENV PYTHONUNBUFFERED=1
WORKDIR /root
"""
