#!/usr/bin/env bash
# Makes Slurm and munge available to this checkout: unpacks Debian's packages into .tools/slurm without installing them,
# unless HOLDFAST_SLURM names a directory where that was done. Never fails: without Slurm the tests that need it are
# skipped and say so.
set -uo pipefail
cd "$(dirname "$0")/.."
tools=.tools/slurm
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0)

usable() { # whether its programs find their libraries
  local libraries=$1/usr/lib/$(uname -m)-linux-gnu
  for program in sbin/munged sbin/slurmstepd-wlm bin/srun bin/sbatch bin/scancel; do
    [ -x "$1/usr/$program" ] || return 1
  done
  for program in slurmctld-wlm slurmd-wlm; do
    LD_LIBRARY_PATH=$libraries/slurm-wlm:$libraries "$1/usr/sbin/$program" -V 2>/dev/null | grep -q '^slurm' || return 1
  done
}

for found in "${HOLDFAST_SLURM:-}" "$tools"; do
  if [ -n "$found" ] && usable "$found"; then
    exit 0
  fi
done

give_up() {
  echo "There is no Slurm here ($1). Holdfast does not need it; its tests of jobs on Slurm are skipped."
  echo "  hint: on Debian and Ubuntu this script unpacks what \`apt-get download\` brings: ${packages[*]}"
  exit 0
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "and no apt to get it with"
mkdir -p "$tools" || give_up "and $tools cannot be made"
download=$(mktemp -d) || give_up "and there is no room for the download"
trap 'rm -rf "$download"' EXIT
chmod 755 "$download" # apt downloads as a user of its own
log=$download/log

fetch() {
  (cd "$download" && timeout 100 apt-get -o APT::Sandbox::User=root download "${packages[@]}") >>"$log" 2>&1
}

echo "fetching Slurm into $tools"
if ! fetch && [ "$(id -u)" = 0 ]; then
  timeout 50 apt-get update >>"$log" 2>&1
  fetch
fi
for package in "$download"/*.deb; do
  [ -e "$package" ] && dpkg-deb -x "$package" "$tools" >>"$log" 2>&1
done
usable "$tools" && exit 0
tail -n 3 "$log"
rm -rf "$tools"
give_up "and apt does not bring one that runs"
