#!/usr/bin/env bash
# Fetches the ONNX Runtime C and C++ headers, which the onnxruntime wheel does not contain, into a folder.
#
#   tools/ort_headers.sh OUTDIR API [SUITE...]     the headers of this API or a newer one
#
# Debian packages them as libonnxruntime-dev, but the release this machine runs may have none or one that is too old.
# So this script writes a private apt source: the machine's own archive, keys and options, with only the suite
# replaced by a newer one. It downloads that one package and unpacks the headers. Nothing is installed, nothing outside
# OUTDIR changes, and root is not needed. Prints the include folder on stdout; everything else goes to stderr.
set -euo pipefail

readonly package=libonnxruntime-dev

say() { echo "ort_headers: $*" >&2; }
die() {
  say "$*"
  say "Instead you can unpack the 'include' folder of any ONNX Runtime release >= 1.$min_api and set ORT_INCLUDE_DIR to it."
  exit 1
}

[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
out=$1 min_api=$2
shift 2

api_of() { sed -n 's/^#define ORT_API_VERSION \([0-9]*\).*/\1/p' "$1/onnxruntime_c_api.h" 2>/dev/null || true; }

have=$(api_of "$out/include")
if [ "${have:-0}" -ge "$min_api" ]; then
  echo "$out/include"
  exit 0
fi

for tool in apt-get dpkg-deb; do
  command -v "$tool" > /dev/null || die "$tool not found: this machine is not Debian-like."
done
. /etc/os-release
case "${ID:-} ${ID_LIKE:-}" in
  debian*) suites=(experimental sid); components=main ;;
  *ubuntu*) suites=(devel-proposed devel); components="main universe" ;;
  *debian*) suites=(experimental sid); components=main ;;
  *) die "${PRETTY_NAME:-this system} is not Debian-like." ;;
esac
[ $# -eq 0 ] || suites=("$@")

# All work happens in a sibling of OUTDIR that is renamed into place at the end, so that an interrupted run leaves
# nothing half-made.
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/.ort-headers.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
work=$(cd "$work" && pwd)

# private_source SUITE: this machine's archive with another suite, in deb822 or one-line form, on stdout.
private_source() {
  local file
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -e "$file" ] || continue
    # The first stanza of binary packages that follows this release (not its -security or -updates alone).
    awk -v suite="$1" -v components="$components" -v release="${VERSION_CODENAME:-}" '
      function flush(   i, field, found) {
        found = 0
        for (i = 1; i <= n; i++)
          if (tolower(line[i]) ~ /^suites:/ && (" " line[i] " ") ~ ("[ \t]" release "[ \t]")) found = 1
        if (found && is_deb && enabled && !done) {
          done = 1
          for (i = 1; i <= n; i++) {
            field = tolower(line[i])
            if (field ~ /^types:/) print "Types: deb"
            else if (field ~ /^suites:/) print "Suites: " suite
            else if (field ~ /^components:/) print "Components: " components
            else print line[i]
          }
        }
        n = 0; is_deb = 0; enabled = 1
      }
      BEGIN { n = 0; is_deb = 0; enabled = 1; done = 0 }
      /^[ \t]*$/ { flush(); next }
      /^#/ { next }
      {
        line[++n] = $0
        if (tolower($0) ~ /^types:.*deb([ \t]|$)/) is_deb = 1
        if (tolower($0) ~ /^enabled:[ \t]*(no|false)/) enabled = 0
      }
      END { flush() }' "$file" > "$work/found"
    if [ -s "$work/found" ]; then
      mv "$work/found" "$work/source.sources"
      echo "$work/source.sources"
      return
    fi
  done
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -e "$file" ] || continue
    sed -nE "s#^[[:space:]]*(deb([[:space:]]+\[[^]]*\])?[[:space:]]+[^[:space:]]+)[[:space:]]+${VERSION_CODENAME:-none}[[:space:]].*#\1 $1 $components#p" \
      "$file" | head -n 1 > "$work/found"
    if [ -s "$work/found" ]; then
      mv "$work/found" "$work/source.list"
      echo "$work/source.list"
      return
    fi
  done
}

# fetch SUITE: downloads the package from SUITE into $work/download. apt verifies it against the machine's own keys.
fetch() {
  local source options
  source=$(private_source "$1")
  [ -n "$source" ] || { say "found no apt source for ${VERSION_CODENAME:-this release} to derive from"; return 1; }
  rm -rf "$work/lists" "$work/archives" "$work/download"
  mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/download"
  options=(-qq -o "Dir::Etc::sourcelist=$source" -o Dir::Etc::sourceparts=/nonexistent
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache::archives=$work/archives"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User= -o Debug::NoLocking=true
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false -o Acquire::Retries=3)
  apt-get "${options[@]}" update &&
    (cd "$work/download" && apt-get "${options[@]}" download "$package") &&
    ls "$work"/download/"$package"_*.deb > /dev/null
}

for suite in "${suites[@]}"; do
  for attempt in 1 2 3; do
    if fetch "$suite" > "$work/log" 2>&1; then break; fi
    # A suite that does not know the package will not learn it by asking again.
    if grep -q "Unable to locate package\|has no installation candidate\|no apt source" "$work/log"; then attempt=3; fi
    [ "$attempt" -lt 3 ] || { say "$suite: $(grep -v '^$' "$work/log" | tail -n 2 | tr '\n' ' ')"; continue 2; }
    sleep $((attempt * 2))
  done
  rm -rf "$work/unpacked"
  dpkg-deb -x "$work"/download/"$package"_*.deb "$work/unpacked"
  api=$(api_of "$work/unpacked/usr/include/onnxruntime")
  if [ "${api:-0}" -lt "$min_api" ]; then
    say "$suite: has API ${api:-?}, lowbit needs $min_api or newer"
    continue
  fi
  mkdir "$work/result"
  mv "$work/unpacked/usr/include/onnxruntime" "$work/result/include"
  mv "$work/unpacked/usr/share/doc/$package/copyright" "$work/result/copyright" 2> /dev/null || true
  rm -rf "$out"
  mv "$work/result" "$out"
  say "API $api from Debian package $(basename "$work"/download/"$package"_*.deb) ($suite)"
  echo "$out/include"
  exit 0
done
die "no suite of [${suites[*]}] gave headers with API >= $min_api."
