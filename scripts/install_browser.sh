#!/usr/bin/env bash
# Makes Chromium available, in which tests look at the dashboard. Never fails: without it those tests are skipped and
# say so. HOLDFAST_CHROMIUM names one that is not on the path.
set -uo pipefail
found() { [ -x "${HOLDFAST_CHROMIUM:-}" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null; }
found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  echo "installing chromium"
  install=(timeout 240 apt-get install -y --no-install-recommends chromium fonts-dejavu-core)
  "${install[@]}" >/dev/null 2>&1 || { timeout 60 apt-get update >/dev/null 2>&1; "${install[@]}" >/dev/null 2>&1; }
fi
found && exit 0
echo "There is no chromium here: tests of the dashboard's page in a browser are skipped."
echo "  hint: install it (Debian and Ubuntu: apt install chromium), or set HOLDFAST_CHROMIUM to the path of one"
