//! Generates a match over all methods of the schema, so that the executor calls each one through the generated client.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use prost::Message as _;
use prost_types::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../proto/kvgrpc/v1");
    let compiler = Command::new(env::var("RUSTC")?).arg("--version").output()?.stdout;
    let version = String::from_utf8(compiler)?.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    println!("cargo:rustc-env=KVGRPC_RUST_VERSION={version}");

    let files = ["admin", "fleet", "handoff", "handshake", "lease", "pool", "scheduler", "tensor", "transfer"];
    let files = files.map(|name| format!("kvgrpc/v1/{name}.proto"));
    let descriptors = protox::compile(files, [Path::new("../proto")])?;
    let descriptors = FileDescriptorSet::decode(descriptors.encode_to_vec().as_slice())?;
    let (mut unary, mut streams, mut redacted) = (String::new(), String::new(), String::new());
    for file in &descriptors.file {
        for service in &file.service {
            for method in &service.method {
                let path = format!("{}.{}/{}", file.package(), service.name(), method.name());
                let call = format!(
                    "kvgrpc::v1::{}_client::{}Client::new(channel).{}",
                    snake(service.name()),
                    service.name(),
                    snake(method.name())
                );
                let input = method.input_type().trim_start_matches(".kvgrpc.v1.");
                writeln!(redacted, "\"{path}\" => shown::<kvgrpc::v1::{input}>(message),")?;
                match (method.client_streaming(), method.server_streaming()) {
                    (false, false) => {
                        writeln!(unary, "\"{path}\" => one(call, async |request| {call}(request).await).await,")
                    }
                    (false, true) => {
                        writeln!(streams, "\"{path}\" => watch(open, async |request| {call}(request).await).await,")
                    }
                    _ => {
                        writeln!(streams, "\"{path}\" => converse(open, async |request| {call}(request).await).await,")
                    }
                }?;
            }
        }
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("unary.rs"), format!("match method {{\n{unary}_ => return None,\n}}"))?;
    fs::write(out.join("redacted.rs"), format!("match method {{\n{redacted}_ => return None,\n}}"))?;
    fs::write(out.join("streams.rs"), format!("match method {{\n{streams}_ => return None,\n}}"))?;
    Ok(())
}

fn snake(name: &str) -> String {
    let mut made = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !made.is_empty() {
            made.push('_');
        }
        made.extend(letter.to_lowercase());
    }
    made
}
