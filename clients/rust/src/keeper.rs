//! Leases that are kept alive over one KeepAlive stream; their holder learns when one is over.

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

/// Renewals that are due this soon go along with one that is due now.
const TOGETHER: Duration = Duration::from_millis(250);
/// Leases in one message. A server takes 10,000, but also no more than 4 MB, and a grant has up to 700 bytes.
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
    /// Renews these leases from now on: at once, then at every third of what was granted. `ttl` is the duration to ask
    /// for; None takes the one that each lease was granted with.
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
    /// One more lease, and its index.
    pub fn add(&mut self, lease: LeaseRef) -> usize {
        let _ = self.added.send(lease.clone()); // fails only when the task is gone, and that goes with the keeper
        self.leases.push(lease);
        self.leases.len() - 1
    }

    /// The lease with this index, counted from 0 in the order in which they were added, as it is known now. None before
    /// the first renewal, and for an index that there is not.
    pub fn kept(&self, index: usize) -> Option<Kept> {
        self.kept.borrow().get(index).cloned()
    }

    /// Returns when that lease is over, or when the keeper is dropped: then with what was known last, since the lease
    /// is not kept any more. Never for an index that there is not.
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

    /// The next lease that is over, with its index; each is told once. None when none is left.
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
                // The answer to this request may still come: it must not be taken for that to the next one.
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
                // A server may answer the call only when it has something to say: the first request goes first.
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

/// Whether a later renewal may be taken. What is wrong with the request or its caller stays wrong.
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
