//! Makes `kvgrpc::v1` from the schema, and from the same schema the table that `methods.rs` looks calls up in.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost::Message as _;
use prost_types::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/kvgrpc/v1");
    let files = schema(Path::new("proto/kvgrpc/v1"))?;
    let descriptors = protox::compile(&files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    fs::write(out.join("methods.rs"), methods(&descriptors))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}

fn schema(folder: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A match arm for each method: whether it is unary, and the number of its request's `idempotency_key`.
fn methods(descriptors: &FileDescriptorSet) -> String {
    let mut keys = HashMap::new();
    for file in &descriptors.file {
        for message in &file.message_type {
            let key = message.field.iter().find(|field| field.name() == "idempotency_key");
            if let Some(number) = key.and_then(|field| field.number) {
                keys.insert(format!(".{}.{}", file.package(), message.name()), number);
            }
        }
    }
    let mut arms = String::new();
    for file in &descriptors.file {
        for service in &file.service {
            for method in &service.method {
                writeln!(
                    arms,
                    "\"/{}.{}/{}\" => Method {{ unary: {}, key_field: {:?} }},",
                    file.package(),
                    service.name(),
                    method.name(),
                    !method.client_streaming() && !method.server_streaming(),
                    keys.get(method.input_type()),
                )
                .expect("a string can be written to");
            }
        }
    }
    format!("match path {{\n{arms}_ => return None,\n}}")
}
