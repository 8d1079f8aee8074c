"""How an image of a training is made: `holdfast kubernetes containerfile > Containerfile`. Pure."""

from __future__ import annotations

TEXT = """# podman build -t IMAGE . or docker build -f Containerfile -t IMAGE .
FROM docker.io/library/python:3.12-slim
# etcd: the same image serves the run's ledger.
RUN apt-get update && apt-get install -y --no-install-recommends etcd-server && rm -rf /var/lib/apt/lists/*
# The same torch on every host, and before Holdfast, which takes any.
RUN pip install --no-cache-dir torch==2.13.0 'holdfast[hosts,s3]'
RUN useradd --uid 10001 --create-home holdfast
WORKDIR /app
COPY . /app
USER 10001
ENTRYPOINT ["holdfast"]
"""
