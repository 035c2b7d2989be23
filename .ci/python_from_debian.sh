#!/usr/bin/env bash
# Unpack a newer CPython than this machine offers, from Debian's unstable packages.
#
#     .ci/python_from_debian.sh 3.14 /opt/python3.14     (then /opt/python3.14/usr/bin/python3.14)
#
# Nothing is installed: the packages of the interpreter and of all that it needs, the C library
# included, are unpacked into the folder, and the interpreter is pointed at them there. So it starts
# the machine's other programs, and they it, which a chroot would not allow.
# Needs apt-get, dpkg-deb and patchelf, and Debian's archive keyring.
set -euo pipefail

version=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# An apt of its own, which believes that no package is installed.
mkdir -p "$work/lists/partial" "$work/archives/partial"
: >"$work/status"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)
[[ -n $mirror ]] || { echo "error: the sources of apt on this machine name no mirror of Debian" >&2; exit 1; }
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror sid main" >"$work/sources.list"
cat >"$work/apt.conf" <<CONFIGURATION
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work";
Dir::Cache::archives "$work/archives";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
CONFIGURATION
export APT_CONFIG="$work/apt.conf"
apt-get update -qq
apt-get install -y -qq --download-only "python$version-venv" >/dev/null
for package in "$work"/archives/*.deb; do
  dpkg-deb -x "$package" "$folder"
done

libraries=$(dirname "$(find "$folder/usr/lib" -name libc.so.6)")
loader=$(find "$folder/usr/lib64" "$libraries" -name 'ld-linux*' 2>/dev/null | head -n 1)
# --force-rpath: extension modules that are installed later find the same libraries.
patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" \
  "$folder/usr/bin/python$version"
# Debian's ensurepip looks for pip where the package would have been installed.
wheels=/usr/share/python-wheels
grep -rlIF "$wheels" "$folder/usr/lib/python$version" --include='_sysconfig*' |
  xargs sed -i "s|$wheels|$folder$wheels|"
"$folder/usr/bin/python$version" --version
