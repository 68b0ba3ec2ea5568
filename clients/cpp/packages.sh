#!/bin/sh
# Runs a command with gRPC, protobuf and GoogleTest for C++: `sh packages.sh cmake -S . -B build`. Without a command it
# only makes sure that they are here.
#
# They are those of this machine, where it has them. Otherwise the packages of Debian or Ubuntu are unpacked into
# .packages beside this file. That needs no root, and changes nothing else on the machine.
set -eu
cd "$(dirname "$0")"
wanted='libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libgtest-dev pkg-config'
root=$PWD/.packages
apt=$PWD/.packages-apt

complete() {
  command -v protoc >/dev/null && command -v grpc_cpp_plugin >/dev/null && command -v pkg-config >/dev/null \
    && pkg-config --exists 'grpc++ >= 1.51.1' 'protobuf >= 3.21.12' gtest
}

within() {
  multiarch=$(dpkg-architecture -q DEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
  PATH=$root/usr/bin:$PATH
  LD_LIBRARY_PATH=$root/usr/lib/$multiarch${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # gRPC's own file names another library folder than that of this architecture.
  CMAKE_LIBRARY_PATH=$root/usr/lib/$multiarch
  LIBRARY_PATH=$root/usr/lib/$multiarch
  # The unpacked files come first, then the machine's own. The headers that these name are found anyway.
  PKG_CONFIG_PATH=$root/usr/lib/$multiarch/pkgconfig:$root/usr/share/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  PKG_CONFIG_SYSROOT_DIR=$root
  export PATH LD_LIBRARY_PATH LIBRARY_PATH CMAKE_LIBRARY_PATH PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
}

# Runs apt with its own lists of packages, which a user who is not root may fetch too.
own_apt() {
  apt-get -q -o Debug::NoLocking=1 -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" "$@"
}

unpack() {
  rm -rf "$root" "$apt"
  mkdir -p "$root" "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/files"
  own_apt update >&2
  # shellcheck disable=SC2086 - a list of names
  missing=$(own_apt -s install --no-install-recommends $wanted | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
  # shellcheck disable=SC2086
  (cd "$apt/files" && own_apt download $missing >&2)
  for file in "$apt"/files/*.deb; do dpkg-deb -x "$file" "$root"; done
  rm -rf "$apt"
}

if ! complete; then
  [ ! -d "$root/usr" ] || within
  if ! complete; then
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
      echo "install gRPC 1.51.1 or newer, protobuf and GoogleTest for C++ (on Debian: $wanted)" >&2
      exit 1
    fi
    unpack || { rm -rf "$root" "$apt"; echo "they could not be fetched; as root: apt-get install $wanted" >&2; exit 1; }
    within
    complete || { echo "those of this distribution do not do: gRPC 1.51.1 or newer is needed" >&2; exit 1; }
  fi
fi
[ $# -eq 0 ] || exec "$@"
