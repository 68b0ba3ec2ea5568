//! Watches the status of an engine.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::Error;
use crate::client::Client;
use crate::events::Events;
use crate::pauses::Pauses;
use crate::v1::{WatchEngineRequest, WatchEngineResponse};
use crate::values::proto_duration;

/// Time without a message after which a server counts as away. A server sends a message at least every 5 s.
const SILENCE: Duration = Duration::from_secs(15);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A watch of an engine. It ends by itself only where every other stream would be refused too.
pub type EngineWatch = Events<EngineEvent>;

/// One event of a watch of an engine.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// The status of the engine. A new `header.incarnation` says that all leases, grants and transfers are gone.
    Status(Box<WatchEngineResponse>),
    /// The server cannot be reached, is silent, or refuses the watch. This is reported once, until there is a status
    /// again. The error of a watch that ends by itself is its last event.
    Unreachable(Error),
}

impl Client {
    /// Watches the status of the engine. It is reported at once and whenever it changes, at most once in
    /// `min_interval`, which is 0.1 s to 5 s; None means 0.1 s. The watch continues over the engine's lives. It
    /// reconnects without limit, with growing pauses of 0.1 s to 2 s.
    ///
    /// The watch ends with PERMISSION_DENIED, UNAUTHENTICATED, UNIMPLEMENTED or INVALID_ARGUMENT, because a retry would
    /// get the same error.
    pub fn watch_engine(&self, min_interval: Option<Duration>) -> EngineWatch {
        let client = self.clone();
        let request = WatchEngineRequest { min_interval: min_interval.map(proto_duration) };
        Events::of(|sender| run(client, request, sender))
    }
}

async fn run(client: Client, request: WatchEngineRequest, sender: mpsc::Sender<EngineEvent>) {
    let mut pauses = Pauses::new(Duration::from_millis(100), LONGEST_PAUSE);
    let mut told = false;
    while !sender.is_closed() {
        let mut heard = false;
        let error = stream(&client, request, &sender, &mut heard).await;
        if heard {
            // A broken connection alone is not reported: the next attempt shows whether the server is there.
            told = false;
            pauses.start_over();
        }
        let (refused, asked) = (is_refusal(error.code()), error.retry_delay());
        let silent = error.code() == Code::DeadlineExceeded;
        if refused || ((!heard || silent) && !told) {
            told = true;
            if sender.send(EngineEvent::Unreachable(error)).await.is_err() || refused {
                return;
            }
        }
        sleep(pauses.next().max(asked.unwrap_or_default())).await;
    }
}

/// Returns whether every other stream would be refused as well.
fn is_refusal(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented | Code::InvalidArgument)
}

/// Reads one stream to its end, and returns why it ended.
async fn stream(
    client: &Client,
    request: WatchEngineRequest,
    sender: &mpsc::Sender<EngineEvent>,
    heard: &mut bool,
) -> Error {
    let silence = |_| Error::new(Code::DeadlineExceeded, format!("the server said nothing for {SILENCE:?}"));
    let mut service = client.handshake();
    let opening = service.watch_engine(request);
    let mut stream = match timeout(SILENCE, opening).await.map_err(silence) {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return status.into(),
        Err(error) => return error,
    };
    loop {
        match timeout(SILENCE, stream.message()).await.map_err(silence) {
            Ok(Ok(Some(message))) => {
                *heard = true;
                if sender.send(EngineEvent::Status(Box::new(message))).await.is_err() {
                    return Error::new(Code::Cancelled, "nobody reads any more");
                }
            }
            Ok(Ok(None)) => return Error::new(Code::Unavailable, "the server ended the watch"),
            Ok(Err(status)) => return status.into(),
            Err(error) => return error,
        }
    }
}
