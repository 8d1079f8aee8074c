#!/usr/bin/env bash
# Generates src/holdfast/ledger/etcd/rpc_pb2.py and its types from rpc.proto. Needs grpcio-tools.
#
# The generated check for the exact protobuf that generated it is taken out: it would tie the package to two major
# versions of protobuf at a time, and these plain messages use nothing that protobuf has changed since 4.21.
set -euo pipefail
cd "$(dirname "$0")/../src"
python=${PYTHON:-../.venv/bin/python}
"$python" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. holdfast/ledger/etcd/rpc.proto
sed -i -e '/import runtime_version/d' -e '/^_runtime_version/,/^)/d' -e '/^# Protobuf Python Version/d' \
  holdfast/ledger/etcd/rpc_pb2.py
