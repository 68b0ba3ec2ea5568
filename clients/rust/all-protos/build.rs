//! Compiles every package of the schema, peer and session included.

use std::error::Error;

const FILES: [&str; 8] = [
    "kvgrpc/v1/admin.proto",
    "kvgrpc/v1/handshake.proto",
    "kvgrpc/v1/pool.proto",
    "kvgrpc/v1/scheduler.proto",
    "kvgrpc/peer/v1/peer.proto",
    "kvgrpc/peer/v1/rank.proto",
    "kvgrpc/session/v1/rank.proto",
    "kvgrpc/session/v1/session.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../proto");
    let descriptors = protox::compile(FILES, ["../proto"])?;
    tonic_prost_build::configure().include_file("all.rs").compile_fds(descriptors)?;
    Ok(())
}
