#!/bin/sh
# Installs the library of a build folder, and builds a program against it in both ways.
set -eu
build=$1 cmake=$2 compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
# Where gRPC's packages are unpacked (packages.sh), pkg-config expects every path below that folder.
folder=$(mktemp -d -p "${PKG_CONFIG_SYSROOT_DIR:-${TMPDIR:-/tmp}}")
trap 'rm -rf "$folder"' EXIT

"$cmake" --install "$build" --prefix "$folder/prefix" >"$folder/install.log"

"$cmake" -S "$here" -B "$folder/by-cmake" -DCMAKE_PREFIX_PATH="$folder/prefix" -DCMAKE_CXX_COMPILER="$compiler"
"$cmake" --build "$folder/by-cmake"
"$folder/by-cmake/consumer"

# The prefix in the file is that of the configuration. pkg-config uses the one that the file lies in.
pc=$(find "$folder/prefix" -name kvgrpc.pc)
export PKG_CONFIG_PATH="$(dirname "$pc")${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
flags=$(pkg-config --define-prefix --cflags --libs kvgrpc)
# shellcheck disable=SC2086
"$compiler" -std=c++17 "$here/consumer.cc" -o "$folder/by-pkg-config" $flags
"$folder/by-pkg-config"
