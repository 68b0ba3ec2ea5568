//! Calls through the generated clients over the wrapper's channel, by the name of the method.

use std::time::Duration;

use kvgrpc::{Channel, Error};
use prost::Message;
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, KeyAndValueRef, MetadataMap};
use tonic::{Request, Response, Status, Streaming};

use crate::json::Failed;

/// The deadline and the metadata that go with a call's message.
#[derive(Default)]
pub struct Beside {
    pub metadata: MetadataMap,
    pub deadline: Option<Duration>,
}

impl Beside {
    pub fn of(request: &Value) -> Result<Self, Failed> {
        let mut metadata = MetadataMap::new();
        for (key, value) in request["metadata"].as_object().unwrap_or(&Map::new()) {
            let wrong = || Failed::Executor(format!("{key} cannot be metadata"));
            let name: AsciiMetadataKey = key.parse().map_err(|_| wrong())?;
            let text: AsciiMetadataValue = value.as_str().ok_or_else(wrong)?.parse().map_err(|_| wrong())?;
            metadata.insert(name, text);
        }
        let deadline = request["deadlineS"].as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Ok(Self { metadata, deadline })
    }

    fn with<M>(self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        *request.metadata_mut() = self.metadata;
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline);
        }
        request
    }
}

/// One unary call and its encoded message.
pub struct Call {
    pub message: Vec<u8>,
    pub beside: Beside,
}

/// One streaming call: the source of the client's messages, and the sink of the server's.
pub struct Open {
    pub outgoing: mpsc::UnboundedReceiver<Vec<u8>>,
    pub beside: Beside,
    pub opened: oneshot::Sender<Value>,
    pub incoming: mpsc::Sender<Item>,
}

/// An encoded message, or None for an end with OK.
pub type Item = Result<Option<Vec<u8>>, Error>;

/// Makes a unary call. It returns None for a method that is not unary.
pub async fn unary(channel: Channel, method: &str, call: Call) -> Option<Result<Vec<u8>, Failed>> {
    Some(include!(concat!(env!("OUT_DIR"), "/unary.rs")))
}

/// Makes a streaming call. It returns None for a unary method, and otherwise when the stream is over.
pub async fn stream(channel: Channel, method: &str, open: Open) -> Option<()> {
    include!(concat!(env!("OUT_DIR"), "/streams.rs"));
    Some(())
}

/// Returns the printed form of a method's encoded request; None for an unknown method.
pub fn redacted(method: &str, message: &[u8]) -> Option<String> {
    Some(include!(concat!(env!("OUT_DIR"), "/redacted.rs")))
}

fn shown<M: Message + Default + std::fmt::Debug>(message: &[u8]) -> String {
    format!("{:?}", typed::<M>(message))
}

async fn one<Q: Message + Default, A: Message>(
    call: Call,
    make: impl AsyncFnOnce(Request<Q>) -> Result<Response<A>, Status>,
) -> Result<Vec<u8>, Failed> {
    let reply = make(call.beside.with(typed(&call.message))).await?;
    Ok(reply.into_inner().encode_to_vec())
}

async fn watch<Q: Message + Default, A: Message>(
    mut open: Open,
    make: impl AsyncFnOnce(Request<Q>) -> Result<Response<Streaming<A>>, Status>,
) {
    let message = open.outgoing.recv().await.unwrap_or_default();
    let opening = make(open.beside.with(typed(&message))).await;
    pump(opening, open.opened, open.incoming).await;
}

async fn converse<Q: Message + Default + 'static, A: Message>(
    open: Open,
    make: impl AsyncFnOnce(Request<Typed<Q>>) -> Result<Response<Streaming<A>>, Status>,
) {
    let outgoing: Typed<Q> = UnboundedReceiverStream::new(open.outgoing).map(|message| typed(&message));
    let opening = make(open.beside.with(outgoing)).await;
    pump(opening, open.opened, open.incoming).await;
}

type Typed<Q> = tokio_stream::adapters::Map<UnboundedReceiverStream<Vec<u8>>, fn(Vec<u8>) -> Q>;

/// Passes messages on. A stream that is refused has opened too: its error is the next item.
async fn pump<A: Message>(
    opening: Result<Response<Streaming<A>>, Status>,
    opened: oneshot::Sender<Value>,
    incoming: mpsc::Sender<Item>,
) {
    let metadata = opening.as_ref().map(|response| texts(response.metadata())).unwrap_or_default();
    let _ = opened.send(metadata.into());
    let mut stream = match opening {
        Ok(response) => response.into_inner(),
        Err(status) => return drop(incoming.send(Err(status.into())).await),
    };
    loop {
        let item = stream.message().await.map(|message| message.map(|message| message.encode_to_vec()));
        let last = !matches!(item, Ok(Some(_)));
        if incoming.send(item.map_err(Error::from)).await.is_err() || last {
            return;
        }
    }
}

fn texts(metadata: &MetadataMap) -> Map<String, Value> {
    let text = |pair: KeyAndValueRef<'_>| match pair {
        KeyAndValueRef::Ascii(key, value) => Some((key.to_string(), value.to_str().ok()?.into())),
        KeyAndValueRef::Binary(..) => None,
    };
    metadata.iter().filter_map(text).collect()
}

fn typed<M: Message + Default>(message: &[u8]) -> M {
    M::decode(message).expect("encoded by the same schema")
}
