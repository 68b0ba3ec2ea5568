//! Watches transfers over streams that break. No message is repeated or lost.
//!
//! Rules:
//! * A stream is opened after the last message that was read, in the life that the message belongs to. A message
//!   without a transfer counts too.
//! * After `history_lost` the reader lists the transfers. The watch continues with later changes.
//! * The watch ends with the engine's life, and when the server is away for longer than the client's patience.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Code;

use crate::Error;
use crate::client::Client;
use crate::events::Events;
use crate::pauses::Pauses;
use crate::v1::{
    FailureReason, NextStep, ResponseHeader, TransferFilter, WatchTransfersRequest, WatchTransfersResponse,
};

const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A stream that lasted this long counts as good, even without a message.
const LASTING: Duration = LONGEST_PAUSE;

/// A watch of transfers. An error is its last item.
pub type Watch = Events<Result<WatchTransfersResponse, Error>>;

/// A point in the changes of one life of the engine. The reader knows all changes up to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Sequence number of the last change.
    pub event_seq: u64,
    /// Incarnation of the life that the number belongs to.
    pub incarnation: u64,
}

impl From<&ResponseHeader> for Position {
    /// Returns the position up to which a reply reports everything.
    fn from(header: &ResponseHeader) -> Self {
        Self { event_seq: header.event_seq, incarnation: header.incarnation }
    }
}

impl Client {
    /// Watches every change of the matching transfers, from now on or after a position, for example that of the header
    /// of an earlier reply. A stream that breaks is resumed after its last message.
    ///
    /// Where `history_lost` is set, changes up to the number in the header may be missing: list the transfers. The
    /// watch ends with ABORTED INCARNATION_CHANGED when the life of the engine is over: its transfers are gone.
    pub fn watch(&self, filter: TransferFilter, after: Option<Position>) -> Watch {
        let (client, position) = (self.clone(), after.unwrap_or_default());
        let watching = Watching { client, filter, position, away_since: Instant::now() };
        Events::of(|sender| watching.run(sender))
    }
}

type Sender = mpsc::Sender<Result<WatchTransfersResponse, Error>>;

struct Watching {
    client: Client,
    filter: TransferFilter,
    position: Position,
    /// Time at which the last good stream ended.
    away_since: Instant,
}

impl Watching {
    async fn run(mut self, sender: Sender) {
        let mut pauses = Pauses::new(Duration::from_millis(100), LONGEST_PAUSE);
        loop {
            let opened = Instant::now();
            let Err(error) = self.stream(&sender).await else {
                return; // nobody reads any more
            };
            if !error.is_passing() || self.away_since.elapsed() > self.client.watch_patience {
                let _ = sender.send(Err(error)).await;
                return;
            }
            if opened.elapsed() >= LASTING {
                pauses.start_over();
            }
            sleep(pauses.next().max(error.retry_delay().unwrap_or_default())).await;
        }
    }

    /// Reads one stream to its end. It returns Ok when the reader is gone.
    async fn stream(&mut self, sender: &Sender) -> Result<(), Error> {
        let request = WatchTransfersRequest {
            filter: Some(self.filter.clone()),
            after_event_seq: self.position.event_seq,
            incarnation: self.position.incarnation,
        };
        let mut stream = self.client.transfers().watch_transfers(request).await?.into_inner();
        let opened = Instant::now();
        let mut heard = false;
        let ended = loop {
            match stream.message().await {
                Ok(Some(message)) => {
                    heard = true;
                    if self.take(&message)? && sender.send(Ok(message)).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(None) => break Error::new(Code::Unavailable, "the server ended the watch"),
                Err(status) => break status.into(),
            }
        };
        // A server is silent while nothing changes, so it was there until now. A server that ends the watch at once was
        // not.
        if heard || opened.elapsed() >= LASTING.min(self.client.watch_patience / 2) {
            self.away_since = Instant::now();
        }
        Err(ended)
    }

    /// Returns whether the reader gets the message: a change that the reader has seen is dropped.
    fn take(&mut self, message: &WatchTransfersResponse) -> Result<bool, Error> {
        let header = message.header.clone().unwrap_or_default();
        let known = self.position;
        if known.incarnation != 0 && header.incarnation != known.incarnation {
            let text = format!("{} has started over: its transfers are gone", header.engine_id);
            let reason = FailureReason::IncarnationChanged;
            return Err(Error::because(Code::Aborted, reason, NextStep::Recompute, text));
        }
        self.position = Position::from(&header);
        if message.history_lost {
            return Ok(true);
        }
        self.position.event_seq = header.event_seq.max(known.event_seq);
        Ok(message.transfer.is_none() || header.event_seq > known.event_seq)
    }
}
