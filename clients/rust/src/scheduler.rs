//! SchedulerService for an engine's scheduler: steps over one stream, and the news in their order.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Response, Streaming};

use crate::Error;
use crate::client::Client;
use crate::pauses::Pauses;
use crate::v1::schedule_answer::Answer;
use crate::v1::schedule_call::Call;
use crate::v1::{
    PollSchedulerNewsRequest, ResponseHeader, ScheduleAnswer, ScheduleCall, ScheduleRequest, ScheduleResponse,
    SchedulerNews,
};
use crate::values::proto_duration;

/// Of one step.
const REPETITIONS: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(10);

/// The scheduler of one engine, which has one. It knows the life of the engine that its requests and blocks are of, and
/// which news were delivered.
#[derive(Debug)]
pub struct Scheduler {
    client: Client,
    stream: Option<Stream>,
    incarnation: u64,
    delivered: u64,
}

#[derive(Debug)]
struct Stream {
    requests: mpsc::Sender<ScheduleRequest>,
    answers: Streaming<ScheduleResponse>,
}

/// What came of one step.
#[derive(Debug)]
pub struct Step {
    /// One for each call, in the same order. A call that was refused is the error that it would be alone.
    pub answers: Vec<Result<Answer, Error>>,
    /// News that were not delivered before, in order. The next step or poll acknowledges them.
    pub news: Vec<SchedulerNews>,
    /// There are others after them.
    pub more: bool,
}

impl Client {
    /// For the scheduler of the server's engine.
    pub fn scheduler(&self) -> Scheduler {
        Scheduler { client: self.clone(), stream: None, incarnation: 0, delivered: 0 }
    }
}

impl Scheduler {
    /// The life of the engine that the requests are of; 0 before the first answer.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// For the life that the engine has now. It knows no request, and blocks that were kept are gone.
    pub fn start_over(&mut self) {
        self.stream = None;
        (self.incarnation, self.delivered) = (0, 0);
    }

    /// All that one step of the scheduler has to say, in one message, and the news. A stream that breaks is opened again
    /// and the step is said again: every call of it is safe to repeat. So it is after a future that was dropped.
    ///
    /// # Errors
    ///
    /// ABORTED INCARNATION_CHANGED: the engine lives anew; see [`start_over`](Self::start_over). The last error, when the
    /// server is away. Nothing of the step is lost or told twice then: make it again.
    pub async fn step(&mut self, calls: impl IntoIterator<Item = ScheduleCall>) -> Result<Step, Error> {
        let request = ScheduleRequest {
            calls: calls.into_iter().collect(),
            after_seq: self.delivered,
            incarnation: self.incarnation,
        };
        let until = Instant::now() + DEADLINE;
        let mut pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(2));
        let mut repetitions = REPETITIONS;
        let reply = loop {
            let late = |_| Error::new(Code::DeadlineExceeded, format!("no answer to the step within {DEADLINE:?}"));
            let error = match timeout_at(until, self.exchange(request.clone())).await.map_err(late) {
                Ok(Ok(reply)) => break reply,
                Ok(Err(error)) | Err(error) => error,
            };
            let pause = pauses.next();
            if error.code() != Code::Unavailable || repetitions == 0 || Instant::now() + pause >= until {
                return Err(error);
            }
            repetitions -= 1;
            sleep(pause).await;
        };
        if reply.answers.len() != request.calls.len() {
            let text = format!("{} calls were answered with {} answers", request.calls.len(), reply.answers.len());
            return Err(Error::new(Code::Internal, text));
        }
        self.learn(reply.header);
        let answers = reply.answers.into_iter().map(answer).collect();
        Ok(Step { answers, news: self.deliver(reply.news), more: reply.more })
    }

    /// News that were not delivered before, waiting so long for the first one, at most 60 s.
    ///
    /// # Errors
    ///
    /// As of [`step`](Self::step).
    pub async fn poll(&mut self, wait: Duration) -> Result<Vec<SchedulerNews>, Error> {
        let request = PollSchedulerNewsRequest {
            after_seq: self.delivered,
            incarnation: self.incarnation,
            wait: Some(proto_duration(wait)),
        };
        let reply = self.client.scheduler_service().poll_scheduler_news(request).await.map(Response::into_inner)?;
        self.learn(reply.header);
        Ok(self.deliver(reply.news))
    }

    /// One message out, one in. The stream is kept only when that went well: the answer to a step that was given up must
    /// not be taken for that to the next one.
    async fn exchange(&mut self, request: ScheduleRequest) -> Result<ScheduleResponse, Error> {
        let ended = || Error::new(Code::Unavailable, "the server ended the stream of steps");
        let mut stream = match self.stream.take() {
            Some(stream) => {
                stream.requests.send(request).await.map_err(|_| ended())?;
                stream
            }
            None => {
                let (requests, outgoing) = mpsc::channel(1);
                // A server may answer the call only when it has something to say: the first step goes first.
                requests.send(request).await.map_err(|_| ended())?;
                let calling = self.client.scheduler_service().schedule(ReceiverStream::new(outgoing)).await;
                Stream { requests, answers: calling?.into_inner() }
            }
        };
        let reply = stream.answers.message().await?.ok_or_else(ended)?;
        self.stream = Some(stream);
        Ok(reply)
    }

    fn learn(&mut self, header: Option<ResponseHeader>) {
        if self.incarnation == 0 {
            self.incarnation = header.unwrap_or_default().incarnation;
        }
    }

    fn deliver(&mut self, news: Vec<SchedulerNews>) -> Vec<SchedulerNews> {
        let fresh: Vec<_> = news.into_iter().filter(|row| row.seq > self.delivered).collect();
        self.delivered = fresh.last().map_or(self.delivered, |row| row.seq);
        fresh
    }
}

fn answer(row: ScheduleAnswer) -> Result<Answer, Error> {
    match (row.failure, row.answer) {
        (Some(failure), _) => Err(Error::reported(row.status_code, failure)),
        (None, Some(answer)) => Ok(answer),
        (None, None) => Err(Error::new(Code::Internal, "an answer that this version does not know")),
    }
}

/// Every request of the service that may be part of a step.
macro_rules! calls_of_a_step {
    ($($variant:ident($request:ident)),* $(,)?) => {$(
        impl From<crate::v1::$request> for ScheduleCall {
            fn from(request: crate::v1::$request) -> Self {
                Self { call: Some(Call::$variant(request)) }
            }
        }
    )*};
}

calls_of_a_step! {
    RequestArrived(RequestArrivedRequest),
    MatchTokens(MatchTokensRequest),
    BlocksAllocated(BlocksAllocatedRequest),
    TokensComputed(TokensComputedRequest),
    BlocksLoaded(BlocksLoadedRequest),
    RequestPreempted(RequestPreemptedRequest),
    RequestFinished(RequestFinishedRequest),
    AbortRequest(AbortRequestRequest),
    BlocksNeeded(BlocksNeededRequest),
}
