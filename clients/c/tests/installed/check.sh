#!/bin/sh
# Installs the library of a build folder, and builds a program against it by CMake and, where there is one, pkg-config.
set -eu
build=$1 cmake=$2 compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$cmake" --install "$build" --prefix "$folder/prefix" >"$folder/install.log"

"$cmake" -S "$here" -B "$folder/by-cmake" -DCMAKE_PREFIX_PATH="$folder/prefix" -DCMAKE_C_COMPILER="$compiler"
"$cmake" --build "$folder/by-cmake"
"$folder/by-cmake/consumer"

command -v pkg-config >/dev/null || { echo "no pkg-config here: only CMake was tried"; exit 0; }
# The prefix in the file is that of the configuration. pkg-config uses the one that the file lies in.
PKG_CONFIG_PATH=$(dirname "$(find "$folder/prefix" -name kvgrpc-engine.pc)")
export PKG_CONFIG_PATH
flags=$(pkg-config --define-prefix --cflags --libs kvgrpc-engine)
# shellcheck disable=SC2086
"$compiler" -std=c11 "$here/consumer.c" -o "$folder/by-pkg-config" $flags
"$folder/by-pkg-config"
