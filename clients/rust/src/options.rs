use std::fmt;
use std::time::Duration;

/// How a [`Client`](crate::Client) behaves. `Options::default()` suits most.
#[derive(Clone)]
pub struct Options {
    /// Deadline of a unary call that states none, repetitions included. A call that waits at the server gets its wait on
    /// top, ConnectPeer and ReleaseQuarantine the 50 s that another server or the ranks may take.
    pub deadline: Duration,
    /// Sent with every call, for example an `authorization`. A key of the call itself goes before it.
    pub metadata: Vec<(String, String)>,
    /// How long the server may be away before a watch of transfers ends with the last error. That it says nothing while
    /// its stream stands does not count.
    pub watch_patience: Duration,
    /// Certificates for an `https://` address. Unset means those that the system trusts.
    #[cfg(feature = "tls")]
    pub tls: Option<tonic::transport::ClientTlsConfig>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            metadata: Vec::new(),
            watch_patience: Duration::from_secs(60),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

impl fmt::Debug for Options {
    /// Without the values of the metadata, which may be secrets.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, _)| (key, "[REDACTED]")).collect();
        formatter
            .debug_struct("Options")
            .field("deadline", &self.deadline)
            .field("metadata", &metadata)
            .field("watch_patience", &self.watch_patience)
            .finish_non_exhaustive()
    }
}
