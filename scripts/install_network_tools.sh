#!/usr/bin/env bash
# Makes ip and nft available, with which tests make hosts in network namespaces and cut the network between them.
# Never fails: without them those tests are skipped and say so.
set -uo pipefail
missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v nft >/dev/null || [ -x /usr/sbin/nft ] || missing+=(nftables)
[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  echo "installing ${missing[*]}"
  install=(timeout 120 apt-get install -y --no-install-recommends "${missing[@]}")
  "${install[@]}" >/dev/null 2>&1 || { timeout 60 apt-get update >/dev/null 2>&1; "${install[@]}" >/dev/null 2>&1; }
fi
command -v ip >/dev/null && { command -v nft >/dev/null || [ -x /usr/sbin/nft ]; } && exit 0
echo "There is no ${missing[*]} here: tests that cut the network are skipped."
echo "  hint: install them (Debian and Ubuntu: apt install iproute2 nftables)"
