//! Messages in Protobuf's JSON mapping, and errors in the form of the executor's protocol.

use std::sync::LazyLock;

use kvgrpc::Error;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde_json::{Value, json};

static SCHEMA: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(kvgrpc::v1::FILE_DESCRIPTOR_SET).expect("the crate's own schema"));

/// The reason that a request was not answered with `ok`.
pub enum Failed {
    /// The error that the wrapper returned.
    Call(Box<Error>),
    /// The reason that the executor cannot carry the request out.
    Executor(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Call(Box::new(error))
    }
}

impl From<tonic::Status> for Failed {
    fn from(status: tonic::Status) -> Self {
        Error::from(status).into()
    }
}

impl Failed {
    pub fn to_json(&self) -> Value {
        let error = match self {
            Self::Executor(message) => return json!({"code": "EXECUTOR", "message": message}),
            Self::Call(error) => error,
        };
        let next = error.next().as_str_name().trim_start_matches("NEXT_STEP_");
        let violations: Vec<_> = error
            .violations()
            .iter()
            .map(|violation| json!({"field": violation.field, "description": violation.description}))
            .collect();
        let mut made = json!({
            "code": error.code_name(),
            "reason": error.reason_name(),
            "message": error.message(),
            "next": next,
            "engineId": error.engine_id(),
            "incarnation": error.incarnation().to_string(),
            "metadata": error.metadata(),
            "violations": violations,
        });
        if let Some(delay) = error.retry_delay() {
            made["retryDelayS"] = json!(delay.as_secs_f64());
        }
        made
    }
}

/// Returns the request and the answer of a method, by its path without a leading slash.
pub fn types_of(method: &str) -> Result<(MessageDescriptor, MessageDescriptor), Failed> {
    let unknown = || Failed::Executor(format!("no method {method}"));
    let (service, name) = method.split_once('/').ok_or_else(unknown)?;
    let service = SCHEMA.get_service_by_name(service).ok_or_else(unknown)?;
    let found = service.methods().find(|method| method.name() == name).ok_or_else(unknown)?;
    Ok((found.input(), found.output()))
}

/// Encodes a message of this type.
pub fn encode(of: &MessageDescriptor, value: &Value) -> Result<Vec<u8>, Failed> {
    let message = DynamicMessage::deserialize(of.clone(), value);
    Ok(message.map_err(|error| Failed::Executor(format!("{}: {error}", of.name())))?.encode_to_vec())
}

/// Returns a message of this type as JSON.
pub fn decode(of: &MessageDescriptor, message: &[u8]) -> Value {
    let message = DynamicMessage::decode(of.clone(), message).expect("what the generated code made");
    serde_json::to_value(message).expect("the mapping has no failures")
}

fn type_named(name: &str) -> MessageDescriptor {
    SCHEMA.get_message_by_name(&format!("kvgrpc.v1.{name}")).expect("a message of the schema")
}

/// Returns a message of the generated code from its JSON.
pub fn read<M: Message + Default>(name: &str, value: &Value) -> Result<M, Failed> {
    let encoded = encode(&type_named(name), value)?;
    M::decode(encoded.as_slice()).map_err(|error| Failed::Executor(error.to_string()))
}

/// Returns a message of the generated code as JSON.
pub fn write<M: Message>(name: &str, message: &M) -> Value {
    decode(&type_named(name), &message.encode_to_vec())
}
