//! Compiles the C library of `clients/c`, which is a part of this crate.

use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=c/src");
    println!("cargo:rerun-if-changed=c/include");
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let mut build = cc::Build::new();
    build.std("c11").include("c/include").define("KVGRPC_ENGINE_VERSION", Some(format!("\"{version}\"").as_str()));
    for entry in fs::read_dir("c/src").expect("the crate has the sources of the C library") {
        let path = entry.expect("a file of the folder can be read").path();
        if path.extension().is_some_and(|extension| extension == "c") {
            build.file(path);
        }
    }
    build.compile("kvgrpc_engine");
}
