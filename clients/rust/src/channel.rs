//! The channel adds to every call what a client must send, whichever generated client makes the call.
//!
//! Rules:
//! * Every unary call of `kvgrpc.v1` has a deadline, which includes its retries.
//! * A unary call is retried after UNAVAILABLE and after nothing else. ConnectPeer is not retried.
//! * A request with an `idempotency_key` is never sent without a key, and all retries have the same key.
//! * A stream is passed on unchanged, because only its reader knows where to resume.
//! * A broken connection is reported as UNAVAILABLE. It says nothing about what the server decided.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Collected, Full};
use prost::encoding;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::body::Body;
#[cfg(feature = "tls")]
use tonic::codegen::http::Uri;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, request, response};
use tonic::codegen::{Service, StdError};
use tonic::transport::{self, Endpoint};
use tonic::{Code, Status, TimeoutExpired};

#[cfg(feature = "tls")]
use crate::connector::TlsConnector;
use crate::credentials::BearerToken;
use crate::error::Called;
use crate::methods::{Method, is_repeated, time_at_server};
use crate::options::Options;
use crate::pauses::Pauses;
use crate::values::idempotency_key;
use crate::{Error, trace};

const REPETITIONS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Time limit of one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the pings of a connection. Servers refuse clients that ping more often.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
const TIMEOUT_HEADER: HeaderName = HeaderName::from_static("grpc-timeout");
/// Number of bytes before a message: a flag and the length.
const FRAME_HEAD: usize = 5;

/// The transport of a [`Client`](crate::Client), for the generated clients of any service of the server.
#[derive(Clone, Debug)]
pub struct Channel {
    inner: transport::Channel,
    address: Arc<str>,
    deadline: Duration,
    metadata: Arc<HeaderMap>,
    token: Option<Arc<BearerToken>>,
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

impl Channel {
    pub(crate) fn new(address: &str, options: &Options) -> Result<Self, Error> {
        let invalid = |why: &dyn std::fmt::Display| Error::new(Code::InvalidArgument, format!("{address}: {why}"));
        #[cfg(feature = "tls")]
        let secured = options.tls_files.is_some() || options.tls.is_some();
        #[cfg(feature = "tls")]
        let scheme = if secured { "https" } else { "http" };
        #[cfg(not(feature = "tls"))]
        let scheme = "http";
        let url = if address.contains("://") { address.to_owned() } else { format!("{scheme}://{address}") };
        let endpoint = Endpoint::from_shared(url).map_err(|error| invalid(&error))?;
        #[cfg(feature = "tls")]
        let endpoint = match endpoint.uri().scheme_str() {
            Some("https") if options.tls_files.is_none() => {
                let system = || transport::ClientTlsConfig::new().with_native_roots();
                let tls = options.tls.clone().unwrap_or_else(system);
                endpoint.tls_config(tls).map_err(|error| invalid(&error))?
            }
            Some("https") | None => endpoint,
            _ if secured => return Err(invalid(&"settings of TLS are for https:// addresses")),
            _ => endpoint,
        };
        let endpoint = with_pings(endpoint);
        let mut metadata = HeaderMap::new();
        for (key, value) in &options.metadata {
            let key = key.parse::<HeaderName>().map_err(|error| invalid(&error))?;
            let mut value: HeaderValue = value.parse().map_err(|_| invalid(&"metadata with bytes that are no text"))?;
            value.set_sensitive(true); // may be a secret: it is not printed
            metadata.append(key, value);
        }
        let (inner, address) = (connected(endpoint, options)?, Arc::from(address));
        let token = BearerToken::of(options)?.map(Arc::new);
        Ok(Self { inner, address, deadline: options.deadline, metadata: Arc::new(metadata), token })
    }

    /// Returns the same connection with this entry in the metadata of every call.
    pub(crate) fn with(&self, key: &'static str, value: &str) -> Result<Self, Error> {
        let value = HeaderValue::try_from(value);
        let value = value.map_err(|_| Error::new(Code::InvalidArgument, format!("{key} is no text")))?;
        let mut metadata = HeaderMap::clone(&self.metadata);
        metadata.insert(key, value);
        Ok(Self { metadata: Arc::new(metadata), ..self.clone() })
    }

    /// Adds metadata to a request. An entry of the request wins over the client's, and both win over the current
    /// span's.
    fn add_metadata(&self, headers: &mut HeaderMap) {
        if let Some(token) = self.token.as_ref().filter(|_| !headers.contains_key(AUTHORIZATION)) {
            headers.insert(AUTHORIZATION, token.authorization());
        }
        for key in self.metadata.keys() {
            if !headers.contains_key(key) {
                for value in self.metadata.get_all(key) {
                    headers.append(key, value.clone());
                }
            }
        }
        if let Some(current) = trace::current().filter(|_| !headers.contains_key(trace::TRACEPARENT)) {
            headers.insert(trace::TRACEPARENT, current);
        }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answering {
        let (mut head, body) = request.into_parts();
        self.add_metadata(&mut head.headers);
        match Method::of(head.uri.path()) {
            Some(method) if method.unary => Box::pin(unary(self.clone(), head, body, method)),
            _ => Box::pin(stream(self.inner.clone(), Request::from_parts(head, body))),
        }
    }
}

#[cfg(feature = "tls")]
fn connected(endpoint: Endpoint, options: &Options) -> Result<transport::Channel, Error> {
    let Some(files) = &options.tls_files else { return Ok(endpoint.connect_lazy()) };
    let connector = TlsConnector::new(files.clone())?;
    // For an https:// address tonic would make a second handshake over that of the connector.
    let origin = endpoint.uri().clone();
    let plain = Uri::builder()
        .scheme("http")
        .authority(origin.authority().map_or("", |authority| authority.as_str()))
        .path_and_query("/")
        .build()
        .map_err(|error| Error::new(Code::InvalidArgument, format!("{origin}: {error}")))?;
    Ok(with_pings(Endpoint::from(plain).origin(origin)).connect_with_connector_lazy(connector))
}

#[cfg(not(feature = "tls"))]
fn connected(endpoint: Endpoint, _: &Options) -> Result<transport::Channel, Error> {
    Ok(endpoint.connect_lazy())
}

fn with_pings(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(false)
}

async fn stream(mut inner: transport::Channel, request: Request<Body>) -> Result<Response<Body>, Status> {
    let response = send(&mut inner, request).await?;
    Ok(response.map(|body| Body::new(body.map_err(broken))))
}

async fn unary(
    Channel { mut inner, address, deadline, .. }: Channel,
    mut head: request::Parts,
    body: Body,
    method: Method,
) -> Result<Response<Body>, Status> {
    let path = head.uri.path().to_owned();
    let frame = with_key(body.collect().await?.to_bytes(), method.key_field);
    let called = Called {
        method: path.trim_start_matches("/kvgrpc.v1.").to_owned(),
        address,
        idempotency_key: key_of(&frame, method.key_field),
    };
    let allowed = stated_timeout(&head.headers)
        .unwrap_or_else(|| deadline + time_at_server(&path, frame.get(FRAME_HEAD..).unwrap_or_default()));
    let until = Instant::now() + allowed;
    let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut repetitions = if is_repeated(&path) { REPETITIONS } else { 0 };
    loop {
        head.headers.insert(TIMEOUT_HEADER, timeout_value(until - Instant::now()));
        let request = Request::from_parts(head.clone(), Body::new(Full::new(frame.clone())));
        let answer =
            timeout_at(until, Answer::of(&mut inner, request)).await.unwrap_or_else(|_| Err(late(&path, allowed)));
        let pause = pauses.next();
        let code = answer.as_ref().map_or_else(Status::code, Answer::code);
        if code != Code::Unavailable || repetitions == 0 || Instant::now() + pause >= until {
            return answer.and_then(Answer::into_response).map_err(|status| called.note(status));
        }
        repetitions -= 1;
        sleep(pause).await;
    }
}

async fn send(inner: &mut transport::Channel, request: Request<Body>) -> Result<Response<Body>, Status> {
    std::future::poll_fn(|context| inner.poll_ready(context)).await.map_err(broken)?;
    inner.call(request).await.map_err(broken)
}

/// The whole response of a unary call, read up to its trailers, which hold the status.
struct Answer {
    head: response::Parts,
    body: Collected<Bytes>,
}

impl Answer {
    async fn of(inner: &mut transport::Channel, request: Request<Body>) -> Result<Self, Status> {
        let (head, body) = send(inner, request).await?.into_parts();
        Ok(Self { head, body: body.collect().await.map_err(broken)? })
    }

    fn status(&self) -> Option<Status> {
        let status = self.body.trailers().and_then(Status::from_header_map);
        status.or_else(|| Status::from_header_map(&self.head.headers))
    }

    fn code(&self) -> Code {
        match self.status() {
            Some(status) => status.code(),
            // The answer is not from a gRPC server but from a proxy whose server is away.
            None if matches!(self.head.status.as_u16(), 429 | 502..=504) => Code::Unavailable,
            None => Code::Unknown,
        }
    }

    /// Returns the response of a call that succeeded or that no gRPC server answered, and otherwise its status.
    fn into_response(self) -> Result<Response<Body>, Status> {
        match self.status() {
            Some(status) if status.code() != Code::Ok => Err(status),
            _ => Ok(Response::from_parts(self.head, Body::new(self.body))),
        }
    }
}

/// Returns the status of a call whose connection broke or could not be made.
fn broken(error: impl Into<StdError>) -> Status {
    let error = error.into();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        if inner.is::<TimeoutExpired>() {
            return Status::deadline_exceeded(inner.to_string());
        }
        let more = inner.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    Status::unavailable(text)
}

fn late(path: &str, allowed: Duration) -> Status {
    Status::deadline_exceeded(format!("{}: no answer within {allowed:?}", path.trim_start_matches('/')))
}

/// Returns the frame with a random key if its message has none. A compressed frame is unchanged.
fn with_key(frame: Bytes, field: Option<i32>) -> Bytes {
    let Some(field) = field.and_then(|field| u32::try_from(field).ok()) else {
        return frame;
    };
    let Some(message) = frame.get(FRAME_HEAD..).filter(|message| frame[0] == 0 && !has_field(message, field)) else {
        return frame;
    };
    let mut keyed = BytesMut::from(message);
    encoding::string::encode(field, &idempotency_key(), &mut keyed);
    let Ok(length) = u32::try_from(keyed.len()) else {
        return frame;
    };
    let mut made = BytesMut::with_capacity(FRAME_HEAD + keyed.len());
    made.put_u8(0);
    made.put_u32(length);
    made.put(keyed);
    made.freeze()
}

/// Returns the key of a frame, or an empty text where it has none that can be read.
fn key_of(frame: &[u8], field: Option<i32>) -> String {
    let field = field.and_then(|field| u32::try_from(field).ok());
    let mut message = frame.get(FRAME_HEAD..).unwrap_or_default();
    while let (Some(field), Ok((number, wire_type))) = (field, encoding::decode_key(&mut message)) {
        let context = encoding::DecodeContext::default();
        if number == field {
            let mut key = String::new();
            return encoding::string::merge(wire_type, &mut key, &mut message, context).map_or(String::new(), |()| key);
        }
        if encoding::skip_field(wire_type, number, &mut message, context).is_err() {
            break;
        }
    }
    String::new()
}

fn has_field(mut message: &[u8], field: u32) -> bool {
    while !message.is_empty() {
        match encoding::decode_key(&mut message) {
            Ok((number, _)) if number == field => return true,
            Ok((number, wire_type)) => {
                if encoding::skip_field(wire_type, number, &mut message, encoding::DecodeContext::default()).is_err() {
                    return true;
                }
            }
            Err(_) => return true,
        }
    }
    false
}

/// Returns the value of the timeout header. It is rounded up, so that the timer of this side ends first.
fn timeout_value(left: Duration) -> HeaderValue {
    let most = 99_999_999; // the header has eight digits
    let value = match u64::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u64::MAX) {
        millis if millis <= most => format!("{}m", millis.max(1)),
        millis => format!("{}S", (millis / 1000).min(most)),
    };
    HeaderValue::try_from(value).expect("digits and a letter")
}

fn stated_timeout(headers: &HeaderMap) -> Option<Duration> {
    let stated = headers.get(TIMEOUT_HEADER)?.to_str().ok()?;
    let (digits, unit) = stated.split_at_checked(stated.len().checked_sub(1)?)?;
    let amount = digits.parse::<u64>().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount.saturating_mul(3600)),
        "M" => Duration::from_secs(amount.saturating_mul(60)),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stated_timeout_is_read_in_every_unit() {
        let stated = |text| stated_timeout(&HeaderMap::from_iter([(TIMEOUT_HEADER, HeaderValue::from_static(text))]));
        assert_eq!(stated("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(stated("250m"), Some(Duration::from_millis(250)));
        assert_eq!(stated("3000u"), Some(Duration::from_millis(3)));
        assert_eq!((stated(""), stated("m"), stated("7x")), (None, None, None));
    }

    #[test]
    fn a_timeout_is_sent_rounded_up_and_in_eight_digits() {
        assert_eq!(timeout_value(Duration::from_micros(1500)), "2m");
        assert_eq!(timeout_value(Duration::ZERO), "1m");
        assert_eq!(timeout_value(Duration::from_secs(100_000)), "100000S");
    }

    #[test]
    fn a_key_is_added_only_where_there_is_none() {
        let frame = |message: &[u8]| {
            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
            Bytes::from([&[0], &length[..], message].concat())
        };
        let keyed = with_key(frame(&[0x12, 1, 7]), Some(1));
        assert_eq!(keyed.len(), FRAME_HEAD + 3 + 2 + 32);
        assert_eq!(keyed[..FRAME_HEAD], [0, 0, 0, 0, 37]);
        assert_eq!(with_key(keyed.clone(), Some(1)), keyed);
        assert_eq!(
            (key_of(&keyed, Some(1)).len(), key_of(&keyed, Some(3)), key_of(&[], Some(1))),
            (32, "".into(), "".into())
        );
        assert_eq!(with_key(frame(&[]), None), frame(&[]));
        let compressed = Bytes::from_static(&[1, 0, 0, 0, 0]);
        assert_eq!(with_key(compressed.clone(), Some(1)), compressed);
    }
}
