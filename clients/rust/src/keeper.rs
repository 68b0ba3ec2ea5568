//! Keeps leases alive over one KeepAlive stream, and tells their holder when one is over.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use crate::Error;
use crate::client::Client;
use crate::pauses::Pauses;
use crate::renewal::{Kept, Renewal};
use crate::v1::{KeepAliveRequest, KeepAliveResponse, LeaseRef, RenewedLease};
use crate::values::proto_duration;

/// Renewals that are due within this time are sent with one that is due now.
const TOGETHER: Duration = Duration::from_millis(250);
/// Largest number of leases in one message. A server takes 10,000, but at most 4 MB, and a grant has up to 700 bytes.
const BATCH: usize = 5_000;
const SHORTEST_ANSWER: Duration = Duration::from_millis(100);
const LONGEST_ANSWER: Duration = Duration::from_secs(10);

/// Keeps leases alive until it is dropped. Dropping it ends no lease.
#[derive(Debug)]
pub struct Keeper {
    kept: watch::Receiver<Vec<Kept>>,
    added: mpsc::UnboundedSender<LeaseRef>,
    task: JoinHandle<()>,
    leases: Vec<LeaseRef>,
    told: BTreeSet<usize>,
}

impl Client {
    /// Renews these leases from now on: at once, and then whenever a third of the granted time has passed. `ttl` is the
    /// duration to ask for; None asks for the TTL that each lease was granted with.
    pub fn keep_alive(&self, leases: impl IntoIterator<Item = LeaseRef>, ttl: Option<Duration>) -> Keeper {
        let (tell, kept) = watch::channel(Vec::new());
        let (added, additions) = mpsc::unbounded_channel();
        let keeping = Keeping { client: self.clone(), ttl, renewals: Vec::new(), tell, additions, stream: None };
        let task = tokio::spawn(keeping.run());
        let mut keeper = Keeper { kept, added, task, leases: Vec::new(), told: BTreeSet::new() };
        for lease in leases {
            keeper.add(lease);
        }
        keeper
    }
}

impl Keeper {
    /// Adds a lease, and returns its index.
    pub fn add(&mut self, lease: LeaseRef) -> usize {
        let _ = self.added.send(lease.clone()); // fails only when the task is gone, which ends with the keeper
        self.leases.push(lease);
        self.leases.len() - 1
    }

    /// Returns what is known now of the lease with this index. Indexes count from 0 in the order of the additions. It
    /// returns None before the first answer to a renewal, and for an index that does not exist.
    pub fn kept(&self, index: usize) -> Option<Kept> {
        self.kept.borrow().get(index).cloned()
    }

    /// Returns when that lease is over, or when the keeper is dropped. In the second case it returns what was known
    /// last, because the lease is not kept any more. It never returns for an index that does not exist.
    pub fn over(&self, index: usize) -> impl Future<Output = Kept> + Send + use<> {
        let mut kept = self.kept.clone();
        let unknown = self.leases.get(index).cloned().map(Kept::unknown);
        async move {
            let over = |all: &Vec<Kept>| all.get(index).is_some_and(|lease| lease.over);
            let _ = kept.wait_for(over).await; // fails when the keeper is gone
            let last = kept.borrow().get(index).cloned();
            match last.or(unknown) {
                Some(lease) => lease,
                None => std::future::pending().await,
            }
        }
    }

    /// Returns the next lease that is over, with its index. Each lease is returned once; None when none is left.
    pub async fn next_over(&mut self) -> Option<(usize, Kept)> {
        while self.told.len() < self.leases.len() {
            let found =
                self.kept.borrow_and_update().iter().enumerate().find_map(|(index, lease)| {
                    (lease.over && !self.told.contains(&index)).then(|| (index, lease.clone()))
                });
            if let Some((index, lease)) = found {
                self.told.insert(index);
                return Some((index, lease));
            }
            self.kept.changed().await.ok()?;
        }
        None
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Stream {
    requests: mpsc::Sender<KeepAliveRequest>,
    answers: Streaming<KeepAliveResponse>,
}

struct Keeping {
    client: Client,
    ttl: Option<Duration>,
    renewals: Vec<Renewal>,
    tell: watch::Sender<Vec<Kept>>,
    additions: mpsc::UnboundedReceiver<LeaseRef>,
    stream: Option<Stream>,
}

impl Keeping {
    async fn run(mut self) {
        let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(1));
        loop {
            while let Ok(lease) = self.additions.try_recv() {
                self.renewals.push(Renewal::new(lease, Instant::now()));
            }
            let now = Instant::now();
            let expired = self.renewals.iter_mut().filter_map(|renewal| renewal.expired(now).then_some(())).count();
            if expired > 0 {
                self.tell_all();
            }
            let next = self.live().map(|(_, renewal)| renewal.due).min();
            match next {
                Some(due) if due <= now => self.renew(now, &mut pauses).await,
                Some(due) => tokio::select! {
                    added = self.additions.recv() => self.added(added),
                    () = sleep_until(due) => {}
                },
                None => {
                    self.stream = None;
                    let added = self.additions.recv().await;
                    self.added(added);
                }
            }
        }
    }

    fn added(&mut self, lease: Option<LeaseRef>) {
        self.renewals.extend(lease.map(|lease| Renewal::new(lease, Instant::now())));
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Renewal)> {
        self.renewals.iter().enumerate().filter(|(_, renewal)| !renewal.kept.over)
    }

    fn tell_all(&self) {
        self.tell.send_replace(self.renewals.iter().map(|renewal| renewal.kept.clone()).collect());
    }

    async fn renew(&mut self, now: Instant, pauses: &mut Pauses) {
        let mut batch: Vec<_> = self.live().filter(|(_, renewal)| renewal.due <= now + TOGETHER).collect();
        batch.sort_by_key(|(_, renewal)| renewal.due);
        batch.truncate(BATCH);
        let soonest = batch.iter().filter_map(|(_, renewal)| renewal.left_until).min();
        let half = soonest.map_or(LONGEST_ANSWER, |until| until.saturating_duration_since(now) / 2);
        let request = KeepAliveRequest {
            leases: batch.iter().map(|(_, renewal)| renewal.kept.lease.clone()).collect(),
            ttl: self.ttl.map(proto_duration),
            ..Default::default()
        };
        let batch: Vec<_> = batch.into_iter().map(|(index, _)| index).collect();
        match timeout(half.clamp(SHORTEST_ANSWER, LONGEST_ANSWER), self.ask(request, batch.len())).await {
            Ok(Ok(rows)) => {
                pauses.start_over();
                for (index, row) in batch.into_iter().zip(rows) {
                    self.renewals[index].answered(row, now);
                }
            }
            Ok(Err(error)) if !may_come_back(error.code()) => {
                self.stream = None;
                for renewal in self.renewals.iter_mut().filter(|renewal| !renewal.kept.over) {
                    renewal.refused(&error);
                }
            }
            failed => {
                // The answer to this request may still come. The next request must not read it as its own.
                self.stream = None;
                let asked = failed.ok().and_then(Result::err).and_then(|error| error.retry_delay());
                let next = Instant::now() + pauses.next().max(asked.unwrap_or_default());
                for index in batch {
                    self.renewals[index].not_answered(next);
                }
                return;
            }
        }
        self.tell_all();
    }

    async fn ask(&mut self, request: KeepAliveRequest, rows: usize) -> Result<Vec<RenewedLease>, Error> {
        let ended = || Error::new(Code::Unavailable, "the server ended the renewals");
        let stream = match &mut self.stream {
            Some(stream) => {
                stream.requests.send(request).await.map_err(|_| ended())?;
                stream
            }
            None => {
                let (requests, outgoing) = mpsc::channel(1);
                // A server may answer the call only when it has something to say, so the first request is sent first.
                requests.send(request).await.map_err(|_| ended())?;
                let answers = self.client.leases().keep_alive(ReceiverStream::new(outgoing)).await?.into_inner();
                self.stream.insert(Stream { requests, answers })
            }
        };
        let leases = stream.answers.message().await?.ok_or_else(ended)?.leases;
        if leases.len() != rows {
            let text = format!("{rows} leases were renewed with {} rows", leases.len());
            return Err(Error::new(Code::Internal, text));
        }
        Ok(leases)
    }
}

/// Returns whether a later renewal may be accepted. An error in the request or its caller is permanent.
fn may_come_back(code: Code) -> bool {
    !matches!(
        code,
        Code::InvalidArgument
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::FailedPrecondition
    )
}
