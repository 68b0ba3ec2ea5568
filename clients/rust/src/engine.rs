//! Watching how an engine is, for as long as one likes.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::Error;
use crate::client::Client;
use crate::events::Events;
use crate::pauses::Pauses;
use crate::v1::{WatchEngineRequest, WatchEngineResponse};

/// A server says something every 5 s. Three times that long without a word, and it is not there.
const SILENCE: Duration = Duration::from_secs(15);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A watch of an engine. It never ends by itself.
pub type EngineWatch = Events<EngineEvent>;

/// What a watch of an engine tells.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// How the engine is. Another `header.incarnation` than before tells that all leases, grants and transfers are gone.
    Status(Box<WatchEngineResponse>),
    /// The server cannot be reached, or says nothing. Told once, until there is a status again.
    Unreachable(Error),
}

impl Client {
    /// How the engine is, at once and whenever that has changed. It outlasts the engine's lives, and connects again for
    /// ever, with growing pauses of 0.1 to 2 s.
    pub fn watch_engine(&self) -> EngineWatch {
        let client = self.clone();
        Events::of(|sender| run(client, sender))
    }
}

async fn run(client: Client, sender: mpsc::Sender<EngineEvent>) {
    let mut pauses = Pauses::new(Duration::from_millis(100), LONGEST_PAUSE);
    let mut told = false;
    while !sender.is_closed() {
        let mut heard = false;
        let error = stream(&client, &sender, &mut heard).await;
        if heard {
            // A connection that breaks says nothing yet of the server: the next attempt does.
            told = false;
            pauses.start_over();
        }
        let silent = error.code() == Code::DeadlineExceeded;
        if (!heard || silent) && !told {
            told = true;
            if sender.send(EngineEvent::Unreachable(error)).await.is_err() {
                return;
            }
        }
        sleep(pauses.next()).await;
    }
}

/// One stream to its end, and why it ended.
async fn stream(client: &Client, sender: &mpsc::Sender<EngineEvent>, heard: &mut bool) -> Error {
    let silence = |_| Error::new(Code::DeadlineExceeded, format!("the server said nothing for {SILENCE:?}"));
    let mut service = client.handshake();
    let opening = service.watch_engine(WatchEngineRequest::default());
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
