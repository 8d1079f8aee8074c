#!/usr/bin/env bash
# Makes HDFS available to this checkout's tests: does nothing if it is there, else puts the jars of Hadoop 2.7's
# NameNode and DataNode into .tools/hadoop/jars. They come from the source package of pyspark 2.4.8, which carries them,
# and from Debian's packages of Jersey 1, without which the daemons' web interfaces do not start; none is installed.
# Never fails: without them the tests that need HDFS are skipped and say so.
set -uo pipefail
cd "$(dirname "$0")/.."
tools=.tools/hadoop
debian=(libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libjsr311-api-java)
# Name and first digits of the version: the archive holds 226 jars, and others of them would be in the way.
jars=(
  hadoop-common-2 hadoop-hdfs-2 hadoop-auth-2 hadoop-annotations-2
  commons-cli-1 commons-codec-1 commons-collections-3 commons-configuration-1 commons-io-2 commons-lang-2
  commons-logging-1 commons-net-3 commons-beanutils-1 commons-digester-1 commons-math3-3 commons-httpclient-3
  guava-14 htrace-core-3 httpclient-4 httpcore-4 jackson-core-asl-1 jackson-mapper-asl-1 jackson-jaxrs-1 jackson-xc-1
  javax.servlet-api-3 jetty-6 jetty-util-6 log4j-1 slf4j-api-1 slf4j-log4j12-1 netty-3 netty-all-4 protobuf-java-2
  xmlenc-0 leveldbjni-all-1 xercesImpl-2 jaxb-api-2 activation-1
)
root() { [ "$(id -u)" = 0 ]; }
java_here() { "${JAVA_HOME:-/usr}/bin/java" -version >/dev/null 2>&1 || java -version >/dev/null 2>&1; }
complete() { [ -f "$tools/complete" ]; } # written last

download=
give_up() {
  [ -n "$download" ] && tail -n 3 "$download/log" 2>/dev/null
  echo "There is no HDFS here ($1). Only the tests of checkpoints on HDFS need it; they are skipped."
  echo "  hint: $2"
  exit 0
}

if [ -z "${HOLDFAST_HADOOP:-}" ] && complete && java_here; then
  exit 0
fi
if [ -n "${HOLDFAST_HADOOP:-}" ] && compgen -G "$HOLDFAST_HADOOP/hadoop-hdfs-*.jar" >/dev/null && java_here; then
  exit 0
fi

download=$(mktemp -d) || give_up "and there is no room for the download" "make room in ${TMPDIR:-/tmp}"
trap 'rm -rf "$download"' EXIT
chmod 755 "$download" # apt downloads as a user of its own
log=$download/log
: >"$log"

twice() { # a mirror may hiccup
  "$@" >>"$log" 2>&1 || "$@" >>"$log" 2>&1
}

if ! java_here; then
  if root && command -v apt-get >/dev/null; then
    echo "installing openjdk-17-jre-headless"
    export DEBIAN_FRONTEND=noninteractive
    install=(timeout 240 apt-get install -y --no-install-recommends openjdk-17-jre-headless)
    "${install[@]}" >>"$log" 2>&1 || { timeout 60 apt-get update >>"$log" 2>&1; "${install[@]}" >>"$log" 2>&1; }
  fi
  java_here || give_up "there is no java" "install one (Debian and Ubuntu: apt install openjdk-17-jre-headless)"
fi
complete && exit 0

for tool in apt-get dpkg-deb tar; do
  command -v "$tool" >/dev/null || give_up "and no $tool to get it with" \
    "set HOLDFAST_HADOOP to a directory with the jars of Hadoop 2.7's NameNode and DataNode"
done
python=.venv/bin/python
[ -x "$python" ] || python=python3
python=$(command -v "$python") || give_up "and no python to get it with" "make install"
[ "${python#/}" = "$python" ] && python=$PWD/$python

echo "fetching Hadoop into $tools (220 MB, of which 30 are kept)"
# The source package asks for any pypandoc to be built with, and the newer ones do not build it.
echo 'pypandoc<1.8' >"$download/build-constraint.txt"
fetch_jars() {
  PIP_BUILD_CONSTRAINT=$download/build-constraint.txt PIP_DISABLE_PIP_VERSION_CHECK=1 timeout 300 \
    "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$download" pyspark==2.4.8
}
fetch_debian() (cd "$download" && timeout 50 apt-get -o APT::Sandbox::User=root download "${debian[@]}")

if ! twice fetch_debian && root; then
  timeout 60 apt-get update >>"$log" 2>&1
  fetch_debian >>"$log" 2>&1
fi
again="look at the lines above, then run scripts/install_hadoop.sh again"
compgen -G "$download/libjersey1-core-java_*.deb" >/dev/null || give_up "apt does not bring ${debian[*]}" "$again"
twice fetch_jars || give_up "pip does not bring pyspark 2.4.8" "$again"

fresh=$tools.new
rm -rf "$fresh"
mkdir -p "$fresh/jars" "$download/debian" || give_up "$fresh cannot be made" "$again"
patterns=()
for jar in "${jars[@]}"; do patterns+=("*/deps/jars/$jar.*.jar"); done
tar -xzf "$download/pyspark-2.4.8.tar.gz" -C "$fresh/jars" --wildcards --no-wildcards-match-slash --transform 's,.*/,,' \
  "${patterns[@]}" >>"$log" 2>&1 || give_up "the archive of pyspark 2.4.8 does not hold every jar" "$again"
for package in "$download"/*.deb; do
  dpkg-deb -x "$package" "$download/debian" >>"$log" 2>&1 || give_up "$(basename "$package") does not unpack" "$again"
done
cp "$download"/debian/usr/share/java/{jersey1-core,jersey1-server,jersey1-servlet,jsr311-api}.jar "$fresh/jars" \
  2>>"$log" || give_up "Debian's packages do not hold every jar" "$again"
touch "$fresh/complete" && rm -rf "$tools" && mv "$fresh" "$tools" || give_up "$tools cannot be made" "$again"
