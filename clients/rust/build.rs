//! Generates `kvgrpc::v1` from the schema, and from the same schema the table in which `methods.rs` looks up calls.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/kvgrpc/v1");
    let files = schema(Path::new("proto/kvgrpc/v1"))?;
    let descriptors = protox::compile(&files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    fs::write(out.join("methods.rs"), methods(&descriptors))?;
    let hiding = Hiding::of(&descriptors);
    fs::write(out.join("redacted.rs"), hiding.code)?;
    tonic_prost_build::configure().skip_debug(hiding.paths).compile_fds(descriptors)?;
    Ok(())
}

/// Names of the fields of type bytes that the schema marks with `debug_redact`. The descriptor types here do not have
/// that option yet. A test of the schema compares the names.
const SECRETS: [&str; 9] =
    ["metadata", "nonce", "proof", "proofs", "rank_ticket", "ticket", "session_secret", "token", "transfer_key"];

/// The messages with a secret. For them, and for their oneofs, `Debug` is written without the secret and not derived.
#[derive(Default)]
struct Hiding {
    paths: Vec<String>,
    code: String,
}

impl Hiding {
    fn of(descriptors: &FileDescriptorSet) -> Self {
        let mut made = Self::default();
        for file in descriptors.file.iter().filter(|file| file.package() == "kvgrpc.v1") {
            for message in file.message_type.iter().filter(|message| message.field.iter().any(is_secret)) {
                made.add(message);
            }
        }
        made
    }

    fn add(&mut self, message: &DescriptorProto) {
        let chosen = |field: &&FieldDescriptorProto| field.oneof_index.is_some() && !field.proto3_optional();
        let mut rows = String::new();
        for field in message.field.iter().filter(|field| !chosen(field)) {
            let name = field.name();
            let value = match (is_secret(field), field.r#type(), field.label()) {
                (true, ..) => "\"[REDACTED]\"".to_owned(),
                (_, Type::Enum, label) if label != Label::Repeated => format!("self.{name}()"),
                _ => format!("self.{name}"),
            };
            write!(rows, ".field(\"{name}\", &{value})").expect("a string can be written to");
        }
        for (index, choice) in message.oneof_decl.iter().enumerate() {
            let of_it = |field: &&FieldDescriptorProto| chosen(field) && field.oneof_index == i32::try_from(index).ok();
            let fields: Vec<_> = message.field.iter().filter(of_it).collect();
            if fields.is_empty() {
                continue; // the oneof of an optional field
            }
            write!(rows, ".field(\"{0}\", &self.{0})", choice.name()).expect("a string can be written to");
            self.add_choice(message, choice.name(), &fields);
        }
        let body = format!("formatter.debug_struct(\"{}\"){rows}.finish()", message.name());
        self.implement(message.name(), &body);
        self.paths.push(format!(".kvgrpc.v1.{}", message.name()));
    }

    fn add_choice(&mut self, message: &DescriptorProto, choice: &str, fields: &[&FieldDescriptorProto]) {
        let mut arms = String::new();
        for field in fields {
            let variant = camel(field.name());
            let (bound, shown) = if is_secret(field) { ("_", "\"[REDACTED]\"") } else { ("value", "value") };
            write!(arms, "Self::{variant}({bound}) => formatter.debug_tuple(\"{variant}\").field(&{shown}).finish(),")
                .expect("a string can be written to");
        }
        self.implement(&format!("{}::{}", snake(message.name()), camel(choice)), &format!("match self {{ {arms} }}"));
    }

    fn implement(&mut self, of: &str, body: &str) {
        let head = "fn fmt(&self, formatter: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result";
        writeln!(self.code, "impl ::core::fmt::Debug for {of} {{ {head} {{ {body} }} }}")
            .expect("a string can be written to");
    }
}

fn is_secret(field: &FieldDescriptorProto) -> bool {
    field.r#type() == Type::Bytes && SECRETS.contains(&field.name())
}

fn camel(name: &str) -> String {
    name.split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
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

/// Returns a match arm for each method: whether it is unary, and the number of its request's `idempotency_key`.
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
