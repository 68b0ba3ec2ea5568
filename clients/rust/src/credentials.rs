//! What a client shows to a server: a certificate of files, and a token. No secret is in their text.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::Code;
use tonic::codegen::http::HeaderValue;

use crate::{Error, Options};

/// Paths of PEM files for TLS. With `ca` alone the client checks the server and shows no certificate.
#[cfg(feature = "tls")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Path of the client's certificate chain.
    pub cert: Option<PathBuf>,
    /// Path of the client's key.
    pub key: Option<PathBuf>,
    /// Path of the CAs that sign servers.
    pub ca: PathBuf,
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// Returns the files of a folder: tls.crt, tls.key and ca.crt, as Kubernetes and cert-manager name them.
    pub fn in_folder(folder: impl AsRef<Path>) -> Self {
        let folder = folder.as_ref();
        Self { cert: Some(folder.join("tls.crt")), key: Some(folder.join("tls.key")), ca: folder.join("ca.crt") }
    }
}

/// Time between two looks at the file of a token.
const LOOK: Duration = Duration::from_secs(1);

/// The token of a client.
pub(crate) struct BearerToken {
    file: Option<PathBuf>,
    now: Mutex<(HeaderValue, Instant)>,
}

impl BearerToken {
    /// Returns none where the options have none.
    pub(crate) fn of(options: &Options) -> Result<Option<Self>, Error> {
        let (token, file) = match (&options.token, &options.token_file) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => return Err(unusable("a token and a file of one are both given")),
            (Some(token), None) => (authorization(token.as_bytes())?, None),
            (None, Some(file)) => (authorization(&read(file)?)?, Some(file.clone())),
        };
        Ok(Some(Self { file, now: Mutex::new((token, Instant::now())) }))
    }

    /// Returns the metadata of a call that is made now. A file that became unusable leaves the last token, because who
    /// writes the file may be half way.
    pub(crate) fn authorization(&self) -> HeaderValue {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = self.file.as_ref().filter(|_| now.1.elapsed() >= LOOK) {
            now.1 = Instant::now();
            if let Ok(token) = read(file).and_then(|content| authorization(&content)) {
                now.0 = token;
            }
        }
        now.0.clone()
    }
}

impl fmt::Debug for BearerToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("[REDACTED]")
    }
}

fn authorization(token: &[u8]) -> Result<HeaderValue, Error> {
    let token = token.trim_ascii();
    let fits = !token.is_empty() && token.iter().all(u8::is_ascii_graphic);
    let value = HeaderValue::from_bytes(&[b"Bearer ", token].concat()).ok().filter(|_| fits);
    let mut value = value.ok_or_else(|| unusable("a token is one word of printable ASCII"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|error| unusable(&format!("{} cannot be read: {error}", path.display())))
}

pub(crate) fn unusable(why: &str) -> Error {
    Error::new(Code::InvalidArgument, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_again_and_an_unusable_file_leaves_the_last() {
        let file = std::env::temp_dir().join(format!("kvgrpc-token-{}", std::process::id()));
        fs::write(&file, "first\n").unwrap();
        let options = Options { token_file: Some(file.clone()), ..Default::default() };
        let token = BearerToken::of(&options).unwrap().unwrap();
        let sent: Vec<_> = ["first", " second\n", ""]
            .map(|content| {
                fs::write(&file, content).unwrap();
                token.now.lock().unwrap().1 -= LOOK;
                token.authorization()
            })
            .into_iter()
            .collect();
        fs::remove_file(file).unwrap();
        assert_eq!(sent, ["Bearer first", "Bearer second", "Bearer second"]);
    }

    #[test]
    fn unusable_credentials_are_refused_and_no_text_shows_them() {
        let secret = || Some("secret word".to_owned());
        let file = || Some(PathBuf::from("/nowhere/token"));
        for options in [
            Options { token: secret(), ..Default::default() },
            Options { token_file: file(), ..Default::default() },
            Options { token: Some("a".to_owned()), token_file: file(), ..Default::default() },
        ] {
            let error = BearerToken::of(&options).unwrap_err();
            assert!(!format!("{error} {error:?} {options:?}").contains("secret"));
        }
        let given = Options { token: Some("secret".to_owned()), ..Default::default() };
        assert!(!format!("{given:?} {:?}", BearerToken::of(&given)).contains("secret"));
    }
}
