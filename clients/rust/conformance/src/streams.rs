//! Streams that requests name: those of the schema, and the wrapper's watches.

use std::sync::Mutex as Lock;
use std::time::Duration;

use kvgrpc::{EngineEvent, EngineWatch, Watch};
use prost_reflect::MessageDescriptor;
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::calls::{self, Beside, Item, Open};
use crate::json::{Failed, decode, encode, types_of, write};

/// A message in JSON, or None for an end with OK.
type Read = Result<Option<Value>, Failed>;

pub struct Stream {
    /// The server that the stream goes to.
    pub server: String,
    outgoing: Lock<Option<mpsc::UnboundedSender<Vec<u8>>>>,
    request: Option<MessageDescriptor>,
    incoming: Mutex<mpsc::Receiver<Read>>,
    task: AbortHandle,
    cancelled: Lock<bool>,
}

impl Stream {
    /// Opens a stream of the schema, and returns it with its initial metadata to come.
    pub fn open(
        server: &str,
        channel: kvgrpc::Channel,
        method: &str,
        first: &Value,
        beside: Beside,
    ) -> Result<(Self, oneshot::Receiver<Value>), Failed> {
        let (request, answer) = types_of(method)?;
        let (outgoing, messages) = mpsc::unbounded_channel();
        if !first.is_null() {
            let _ = outgoing.send(encode(&request, first)?);
        }
        let (opened, metadata) = oneshot::channel();
        let (raw, mut items) = mpsc::channel::<Item>(1);
        let open = Open { outgoing: messages, beside, opened, incoming: raw };
        let method = method.to_owned();
        let mut stream = Self::running(server, move |incoming| async move {
            let reading = async {
                while let Some(item) = items.recv().await {
                    let read = item.map(|message| message.map(|bytes| decode(&answer, &bytes)));
                    if incoming.send(read.map_err(Failed::from)).await.is_err() {
                        return;
                    }
                }
            };
            tokio::join!(calls::stream(channel, &method, open), reading);
        });
        stream.outgoing = Lock::new(Some(outgoing));
        stream.request = Some(request);
        Ok((stream, metadata))
    }

    /// Returns the wrapper's watch of transfers as a stream.
    pub fn watch(server: &str, mut watch: Watch) -> Self {
        Self::running(server, |incoming| async move {
            while let Some(change) = watch.next().await {
                let read = change.map(|change| Some(write("WatchTransfersResponse", &change))).map_err(Failed::from);
                if incoming.send(read).await.is_err() {
                    return;
                }
            }
        })
    }

    /// Returns the wrapper's watch of an engine as a stream. An unreachable engine is not a message.
    pub fn watch_engine(server: &str, mut watch: EngineWatch) -> Self {
        Self::running(server, |incoming| async move {
            while let Some(event) = watch.next().await {
                if let EngineEvent::Status(status) = event {
                    let read = Ok(Some(write("WatchEngineResponse", &*status)));
                    if incoming.send(read).await.is_err() {
                        return;
                    }
                }
            }
        })
    }

    fn running<Run>(server: &str, run: impl FnOnce(mpsc::Sender<Read>) -> Run) -> Self
    where
        Run: Future<Output = ()> + Send + 'static,
    {
        let (sender, incoming) = mpsc::channel(1);
        Self {
            server: server.to_owned(),
            outgoing: Lock::new(None),
            request: None,
            incoming: Mutex::new(incoming),
            task: tokio::spawn(run(sender)).abort_handle(),
            cancelled: Lock::new(false),
        }
    }

    /// Sends one more message of the client.
    pub fn send(&self, message: &Value) -> Result<(), Failed> {
        let outgoing = self.outgoing.lock().expect("no panic");
        let (Some(outgoing), Some(request)) = (&*outgoing, &self.request) else {
            return Err(Failed::Executor("the client's stream has ended".into()));
        };
        // A stream that the server has ended takes no message; `next` reports the end.
        let _ = outgoing.send(encode(request, message)?);
        Ok(())
    }

    /// Ends the client's messages.
    pub fn finish(&self) {
        self.outgoing.lock().expect("no panic").take();
    }

    pub fn cancel(&self) {
        *self.cancelled.lock().expect("no panic") = true;
        self.task.abort();
    }

    /// Returns the next message.
    pub async fn next(&self, patience: Duration) -> Result<Value, Failed> {
        if *self.cancelled.lock().expect("no panic") {
            return Err(tonic::Status::cancelled("by the caller").into());
        }
        match timeout(patience, async { self.incoming.lock().await.recv().await }).await {
            Err(_) => Ok(json!({"timeout": true})),
            Ok(Some(Ok(Some(message)))) => Ok(json!({"message": message})),
            Ok(Some(Err(error))) => Err(error),
            Ok(Some(Ok(None)) | None) => Ok(json!({"end": true})),
        }
    }
}
