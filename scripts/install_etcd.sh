#!/usr/bin/env bash
# Makes etcd available to this checkout: does nothing if there is one, else unpacks Debian's package into .tools/etcd
# without installing it. Never fails: without etcd the tests that need it are skipped and say so.
set -uo pipefail
cd "$(dirname "$0")/.."
tools=.tools/etcd
binary=$tools/usr/bin/etcd

usable() { # whether this etcd starts; 3.5.0 to 3.5.2 can lose consistency when they are killed
  local version
  version=$("$1" --version 2>/dev/null | sed -n 's/^etcd Version: //p')
  case $version in
    '') return 1 ;;
    3.5.[012]) echo "etcd $version at $1 can lose writes when it is killed: not used"; return 1 ;;
  esac
}

for found in "${HOLDFAST_ETCD:-}" "$(command -v etcd)" "$binary"; do
  if [ -n "$found" ] && usable "$found"; then
    exit 0
  fi
done

give_up() {
  echo "There is no etcd here ($1). Holdfast needs it only for runs on several hosts; tests of that are skipped."
  echo "  hint: install it (Debian and Ubuntu: apt install etcd-server; others: the release archives of etcd-io/etcd,"
  echo "        3.4, or 3.5.3 and later), or set HOLDFAST_ETCD to the path of an etcd"
  exit 0
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "and no apt to get it with"

mkdir -p "$tools" || give_up "and $tools cannot be made"
download=$(mktemp -d) || give_up "and there is no room for the download"
trap 'rm -rf "$download"' EXIT
chmod 755 "$download" # apt downloads as a user of its own
log=$download/log

fetch() { (cd "$download" && timeout 50 apt-get -o APT::Sandbox::User=root download etcd-server) >>"$log" 2>&1; }
root() { [ "$(id -u)" = 0 ]; }

echo "fetching etcd-server into $tools"
if ! fetch && root; then
  timeout 50 apt-get update >>"$log" 2>&1
  fetch
fi
package=$(ls "$download"/etcd-server_*.deb 2>/dev/null | head -n 1)
if [ -n "$package" ] && dpkg-deb -x "$package" "$tools" >>"$log" 2>&1 && usable "$binary"; then
  exit 0
fi
rm -rf "$tools"
# RUNLEVEL=1: the package would otherwise start a server of its own.
if root && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y --no-install-recommends etcd-server >>"$log" 2>&1 \
    && usable etcd; then
  exit 0
fi
tail -n 3 "$log"
give_up "and apt does not bring one"
