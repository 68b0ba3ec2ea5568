//! One server, as its clients see it.

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

/// A client of the server at `address` (`host:port`), in the current Tokio runtime. Nothing is sent before the first
/// call, and a server that is away is an error of that call.
///
/// # Errors
///
/// INVALID_ARGUMENT for an address or metadata that cannot be.
pub fn connect(address: &str, options: Options) -> Result<Client, Error> {
    Ok(Client { channel: Channel::new(address, &options)?, watch_patience: options.watch_patience })
}

/// One server. Cheap to clone; all clones share one connection, and any number of calls may run at once.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) channel: Channel,
    pub(crate) watch_patience: std::time::Duration,
}

impl Client {
    /// The transport, for generated clients of other services, such as `grpc.health.v1`. What it adds to calls it adds to
    /// those of `kvgrpc.v1` only: others have the deadline that their caller states.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The same connection, for the calls of one request: each carries this W3C trace context.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT for what cannot be a header.
    pub fn with_traceparent(&self, traceparent: &str) -> Result<Self, Error> {
        Ok(Self { channel: self.channel.with(trace::TRACEPARENT, traceparent)?, ..self.clone() })
    }

    /// Who is there, what it can do, and how it is now.
    pub fn handshake(&self) -> HandshakeServiceClient<Channel> {
        HandshakeServiceClient::new(self.channel())
    }

    /// Handing blocks over, and taking them.
    pub fn handoff(&self) -> HandoffServiceClient<Channel> {
        HandoffServiceClient::new(self.channel())
    }

    /// Following and ending transfers.
    pub fn transfers(&self) -> TransferServiceClient<Channel> {
        TransferServiceClient::new(self.channel())
    }

    /// Pinning finished blocks.
    pub fn leases(&self) -> LeaseServiceClient<Channel> {
        LeaseServiceClient::new(self.channel())
    }

    /// The pool: what it is, what is free, allocation.
    pub fn pool(&self) -> PoolServiceClient<Channel> {
        PoolServiceClient::new(self.channel())
    }

    /// The calls of an engine's scheduler, one by one. [`Client::scheduler`](Self::scheduler) makes steps of them.
    pub fn scheduler_service(&self) -> SchedulerServiceClient<Channel> {
        SchedulerServiceClient::new(self.channel())
    }

    /// Named tensors, of a server whose pool is a staging store.
    pub fn tensors(&self) -> TensorServiceClient<Channel> {
        TensorServiceClient::new(self.channel())
    }

    /// An operator's questions.
    pub fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel())
    }
}
