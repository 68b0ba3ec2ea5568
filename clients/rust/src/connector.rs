//! Connections under TLS. The files are read again for each one, so that a new connection has the files of its moment.
//!
//! tonic's own TLS keeps what an endpoint began with, so the channel connects without it, over this connector.

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::codegen::http::Uri;
use tonic::codegen::{Service, StdError};

use crate::{Error, TlsFiles, credentials};

const HTTP_2: &[u8] = b"h2";

/// Makes the connections of one channel.
#[derive(Clone)]
pub(crate) struct TlsConnector(Arc<Shared>);

struct Shared {
    files: TlsFiles,
    /// What the files held when they were last usable.
    last: Mutex<Arc<ClientConfig>>,
}

impl TlsConnector {
    pub(crate) fn new(files: TlsFiles) -> Result<Self, Error> {
        let last = Mutex::new(Arc::new(config(&files)?));
        Ok(Self(Arc::new(Shared { files, last })))
    }

    /// Returns what a new connection needs. Files that became unusable leave the last, because who writes them may be
    /// half way.
    fn config(&self) -> Arc<ClientConfig> {
        let mut last = self.0.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(now) = config(&self.0.files) {
            *last = Arc::new(now);
        }
        last.clone()
    }
}

impl Service<Uri> for TlsConnector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = StdError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, StdError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let own = self.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let tcp = TcpStream::connect((host.as_str(), uri.port_u16().unwrap_or(443))).await?;
            tcp.set_nodelay(true)?;
            let connector = tokio_rustls::TlsConnector::from(own.config());
            let stream = connector.connect(ServerName::try_from(host)?, tcp).await?;
            if stream.get_ref().1.alpn_protocol() != Some(HTTP_2) {
                return Err("the server does not speak HTTP/2 over TLS".into());
            }
            Ok(TokioIo::new(stream))
        })
    }
}

/// Returns what the files hold now.
fn config(files: &TlsFiles) -> Result<ClientConfig, Error> {
    let mut roots = RootCertStore::empty();
    for ca in certificates(&files.ca)? {
        roots.add(ca).map_err(|error| unusable(&files.ca, &error))?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&files.ca, &error))?
        .with_root_certificates(roots);
    let mut config = match (&files.cert, &files.key) {
        (Some(cert), Some(key)) => {
            let own = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| unusable(key, &error))?;
            builder.with_client_auth_cert(certificates(cert)?, own).map_err(|error| unusable(cert, &error))?
        }
        (None, None) => builder.with_no_client_auth(),
        _ => return Err(credentials::unusable("a certificate and its key need a path each")),
    };
    config.alpn_protocols.push(HTTP_2.to_vec());
    Ok(config)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(found) if found.is_empty() => Err(unusable(path, &"it holds no certificate in PEM")),
        found => found.map_err(|error| unusable(path, &error)),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> Error {
    credentials::unusable(&format!("{}: {why}", path.display()))
}
