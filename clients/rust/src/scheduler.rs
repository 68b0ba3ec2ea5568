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

/// Number of retries of one step.
const REPETITIONS: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(10);

/// The one scheduler of an engine. It knows the life of the engine that its requests and blocks belong to, and which
/// news were delivered.
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

/// The result of one step.
#[derive(Debug)]
pub struct Step {
    /// One answer for each call, in the same order. A refused call has the error that it would have alone.
    pub answers: Vec<Result<Answer, Error>>,
    /// News that were not delivered before, in order. The next step or poll acknowledges them.
    pub news: Vec<SchedulerNews>,
    /// Whether more news follow.
    pub more: bool,
}

impl Client {
    /// Returns the scheduler of the server's engine.
    pub fn scheduler(&self) -> Scheduler {
        Scheduler { client: self.clone(), stream: None, incarnation: 0, delivered: 0 }
    }
}

impl Scheduler {
    /// Returns the incarnation of the engine that the requests belong to; 0 before the first answer.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Starts over with the engine's present life. The engine knows no request, and the kept blocks are gone.
    pub fn start_over(&mut self) {
        self.stream = None;
        (self.incarnation, self.delivered) = (0, 0);
    }

    /// Sends everything that one step of the scheduler reports, in one message. It returns the answers and the
    /// news. When a stream breaks, another one is opened and the step is repeated: every call of a step is safe to
    /// repeat. The same holds after a dropped future.
    ///
    /// # Errors
    ///
    /// ABORTED INCARNATION_CHANGED: the engine has restarted; see [`start_over`](Self::start_over). The last error,
    /// when the server is away: repeat the step then, because nothing of it is lost or reported twice.
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

    /// Returns the news that were not delivered before. It waits up to `wait` for the first item, at most 60 s.
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step).
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

    /// Sends one message and reads one. The stream is kept only after a success, because the next step must not read
    /// the answer to a step that was given up.
    async fn exchange(&mut self, request: ScheduleRequest) -> Result<ScheduleResponse, Error> {
        let ended = || Error::new(Code::Unavailable, "the server ended the stream of steps");
        let mut stream = match self.stream.take() {
            Some(stream) => {
                stream.requests.send(request).await.map_err(|_| ended())?;
                stream
            }
            None => {
                let (requests, outgoing) = mpsc::channel(1);
                // A server may answer the call only when it has something to say, so the first step is sent first.
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

/// Makes a [`ScheduleCall`] of every request of the service that may be part of a step.
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
