//! One server as its clients see it.

use crate::channel::Channel;
use crate::options::Options;
use crate::v1::admin_service_client::AdminServiceClient;
use crate::v1::handoff_service_client::HandoffServiceClient;
use crate::v1::handshake_service_client::HandshakeServiceClient;
use crate::v1::lease_service_client::LeaseServiceClient;
use crate::v1::pool_service_client::PoolServiceClient;
use crate::v1::scheduler_service_client::SchedulerServiceClient;
use crate::v1::tensor_service_client::TensorServiceClient;
use crate::v1::transfer_service_client::TransferServiceClient;
use crate::{Error, trace};

/// Returns a client of the server at `address` (`host:port`), in the current Tokio runtime. It sends nothing before the
/// first call. If the server is away, that call fails.
///
/// # Errors
///
/// INVALID_ARGUMENT for an invalid address or invalid metadata.
pub fn connect(address: &str, options: Options) -> Result<Client, Error> {
    Ok(Client { channel: Channel::new(address, &options)?, watch_patience: options.watch_patience })
}

/// A client of one server. It is cheap to clone. All clones share one connection, and any number of calls may run at
/// once.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) channel: Channel,
    pub(crate) watch_patience: std::time::Duration,
}

impl Client {
    /// Returns the transport, for generated clients of other services such as `grpc.health.v1`. Only calls of
    /// `kvgrpc.v1` get a deadline and a key here. A call of another service has the deadline that its caller states.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Returns the same connection for the calls of one request. Each call carries this W3C trace context.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT for a text that cannot be a header.
    pub fn with_traceparent(&self, traceparent: &str) -> Result<Self, Error> {
        Ok(Self { channel: self.channel.with(trace::TRACEPARENT, traceparent)?, ..self.clone() })
    }

    /// Returns the service for the server's identity, its capabilities and its status.
    pub fn handshake(&self) -> HandshakeServiceClient<Channel> {
        HandshakeServiceClient::new(self.channel())
    }

    /// Returns the service that hands blocks over and takes them.
    pub fn handoff(&self) -> HandoffServiceClient<Channel> {
        HandoffServiceClient::new(self.channel())
    }

    /// Returns the service that follows and ends transfers.
    pub fn transfers(&self) -> TransferServiceClient<Channel> {
        TransferServiceClient::new(self.channel())
    }

    /// Returns the service that pins finished blocks.
    pub fn leases(&self) -> LeaseServiceClient<Channel> {
        LeaseServiceClient::new(self.channel())
    }

    /// Returns the service of the pool: its description, its free blocks, and allocation.
    pub fn pool(&self) -> PoolServiceClient<Channel> {
        PoolServiceClient::new(self.channel())
    }

    /// Returns the service with the single calls of an engine's scheduler. [`Client::scheduler`](Self::scheduler)
    /// combines them into steps.
    pub fn scheduler_service(&self) -> SchedulerServiceClient<Channel> {
        SchedulerServiceClient::new(self.channel())
    }

    /// Returns the service of named tensors, for a server whose pool is a staging store.
    pub fn tensors(&self) -> TensorServiceClient<Channel> {
        TensorServiceClient::new(self.channel())
    }

    /// Returns the service for operators.
    pub fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel())
    }
}
