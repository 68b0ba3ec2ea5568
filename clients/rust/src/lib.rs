//! Client of kvgrpc, the service that moves KV-cache blocks between LLM engines.
//!
//! [`connect`] returns a [`Client`]. Its services are the generated clients of [`v1`] over one [`Channel`]. The channel
//! adds to every call what the protocol asks of clients: a deadline, an idempotency key, the retry of UNAVAILABLE, and
//! the trace context. [`Error`] is a typed status. The crate also has the loops that users need: [`Client::wait`],
//! [`Client::watch`], [`Client::watch_engine`], [`Client::keep_alive`], [`clean_up`], [`Client::pull`], [`move_blocks`]
//! and [`Client::scheduler`]. `{:?}` of a message hides its secrets.
//!
//! ```no_run
//! # async fn example() -> Result<(), kvgrpc::Error> {
//! let client = kvgrpc::connect("127.0.0.1:50051", kvgrpc::Options::default())?;
//! let reply = client.handshake().get_capabilities(kvgrpc::v1::GetCapabilitiesRequest {}).await?;
//! println!("{:?}", reply.into_inner().admission());
//! # Ok(())
//! # }
//! ```

mod channel;
mod cleanup;
mod client;
#[cfg(feature = "tls")]
mod connector;
mod credentials;
mod engine;
mod error;
mod events;
mod keeper;
mod methods;
mod moves;
mod options;
mod pauses;
mod reading;
mod renewal;
mod scheduler;
mod trace;
mod values;
mod waiting;
mod watch;

pub use channel::Channel;
pub use cleanup::{Side, clean_up};
pub use client::{Client, connect};
#[cfg(feature = "tls")]
pub use credentials::TlsFiles;
pub use engine::{EngineEvent, EngineWatch};
pub use error::{DOMAIN, Error, FieldViolation};
pub use events::Events;
pub use keeper::Keeper;
pub use moves::{Moved, Moving, move_blocks};
pub use options::Options;
pub use renewal::Kept;
pub use scheduler::{Scheduler, Step};
pub use values::{proto_duration, random_key, std_duration};
pub use waiting::Waited;
pub use watch::{Position, Watch};

/// The generated code of the package `kvgrpc.v1`. The comments are the contract.
#[allow(missing_docs, clippy::all, rustdoc::all)]
pub mod v1 {
    tonic::include_proto!("kvgrpc.v1");
    include!(concat!(env!("OUT_DIR"), "/redacted.rs"));

    /// The schema as an encoded `google.protobuf.FileDescriptorSet`, for reflection and for JSON.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
