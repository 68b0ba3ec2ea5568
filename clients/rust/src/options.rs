use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Options of a [`Client`](crate::Client). `Options::default()` suits most programs.
#[derive(Clone)]
pub struct Options {
    /// Deadline of a unary call that states none, retries included. The wait of a call that waits at the server is
    /// added to it. For ConnectPeer and ReleaseQuarantine 50 s are added, which another server or the ranks may take.
    pub deadline: Duration,
    /// Metadata of every call. A key that the call itself states wins.
    pub metadata: Vec<(String, String)>,
    /// Bearer token that every call carries.
    pub token: Option<String>,
    /// Path of a file with the token, in place of `token`. The file is read again once a second.
    pub token_file: Option<PathBuf>,
    /// How long the server may be away before a watch of transfers ends with the last error. Silence on an open stream
    /// does not count.
    pub watch_patience: Duration,
    /// Files of TLS, which [`connect`](crate::connect) reads once. An address without a scheme is then one of
    /// `https://`.
    #[cfg(feature = "tls")]
    pub tls_files: Option<crate::TlsFiles>,
    /// Certificates for an `https://` address, in place of `tls_files`. By default these are the ones that the system
    /// trusts.
    #[cfg(feature = "tls")]
    pub tls: Option<tonic::transport::ClientTlsConfig>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            metadata: Vec::new(),
            token: None,
            token_file: None,
            watch_patience: Duration::from_secs(60),
            #[cfg(feature = "tls")]
            tls_files: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

impl fmt::Debug for Options {
    /// Omits the token and the values of the metadata, because they may be secrets.
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
