//! Tests the steps of a scheduler over a stream, and the news.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Answers, Running, Scheduling, Server, client, header, on, soon};
use kvgrpc::v1::schedule_answer::Answer;
use kvgrpc::v1::schedule_call::Call;
use kvgrpc::v1::{
    AbortRequestRequest, BlocksNeededRequest, Failure, FailureReason, MatchTokensRequest, MatchTokensResponse,
    NextStep, PollSchedulerNewsRequest, PollSchedulerNewsResponse, ScheduleAnswer, ScheduleRequest, ScheduleResponse,
    SchedulerNews,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

/// Starts a server that plays `reply(n)` to the n-th step, over as many streams as that takes. An error ends a stream.
async fn scheduled(
    reply: impl Fn(usize, &ScheduleRequest) -> Result<ScheduleResponse, Status> + Send + Sync + 'static,
) -> (Running, mpsc::UnboundedReceiver<(usize, ScheduleRequest)>) {
    let (sender, steps) = mpsc::unbounded_channel();
    let (streams, count, reply) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)), Arc::new(reply));
    let schedule = on(move |request: Request<Streaming<ScheduleRequest>>| {
        let stream = streams.fetch_add(1, Ordering::SeqCst);
        let (count, reply, sender) = (Arc::clone(&count), Arc::clone(&reply), sender.clone());
        let mut requests = request.into_inner();
        let (outgoing, incoming) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let answer = reply(count.fetch_add(1, Ordering::SeqCst), &request);
                let _ = sender.send((stream, request));
                let over = answer.is_err();
                let _ = outgoing.send(answer).await;
                if over {
                    return;
                }
            }
        });
        let stream: Answers<ScheduleResponse> = ReceiverStream::new(incoming);
        async move { Ok(stream) }
    });
    let scheduling = Scheduling { schedule, ..Default::default() };
    (Server { scheduling, ..Default::default() }.start().await, steps)
}

fn news(seqs: impl IntoIterator<Item = u64>) -> Vec<SchedulerNews> {
    seqs.into_iter().map(|seq| SchedulerNews { seq, ..Default::default() }).collect()
}

fn told(rows: &[SchedulerNews]) -> Vec<u64> {
    rows.iter().map(|row| row.seq).collect()
}

#[tokio::test]
async fn steps_share_a_stream_state_the_life_and_acknowledge_the_news_of_the_last_one() {
    let (server, mut steps) = scheduled(|step, _| {
        let news = if step == 0 { news([1, 2]) } else { news([]) };
        Ok(ScheduleResponse { header: header(7, 0), news, more: step == 0, ..Default::default() })
    })
    .await;
    let mut scheduler = client(server.address).scheduler();
    let step = soon(scheduler.step([])).await.unwrap();
    assert_eq!((told(&step.news), step.more, scheduler.incarnation()), (vec![1, 2], true, 7));
    soon(scheduler.step([])).await.unwrap();
    let said = |(stream, request): (usize, ScheduleRequest)| (stream, request.incarnation, request.after_seq);
    assert_eq!(said(soon(steps.recv()).await.unwrap()), (0, 0, 0));
    assert_eq!(said(soon(steps.recv()).await.unwrap()), (0, 7, 2));
}

#[tokio::test]
async fn a_step_whose_stream_breaks_is_said_again_and_its_news_are_told_once_and_in_order() {
    let (server, mut steps) = scheduled(|step, request| match step {
        1 => Err(Status::unavailable("cut")),
        _ => {
            // A server repeats news that may not have arrived.
            let news = news(request.after_seq.saturating_sub(1)..request.after_seq + 3);
            Ok(ScheduleResponse { header: header(7, 0), news, answers: vec![matched(1)], more: false })
        }
    })
    .await;
    let mut scheduler = client(server.address).scheduler();
    let mut seen = Vec::new();
    for request_id in ["a", "b"] {
        let call = MatchTokensRequest { request_id: request_id.into(), computed_tokens: 0 };
        seen.extend(told(&soon(scheduler.step([call.into()])).await.unwrap().news));
    }
    assert_eq!(seen, [1, 2, 3, 4]);
    let mut said = Vec::new();
    for _ in 0..3 {
        let (stream, request) = soon(steps.recv()).await.unwrap();
        let Some(Call::MatchTokens(call)) = &request.calls[0].call else { panic!("another call") };
        said.push((stream, call.request_id.clone(), request.after_seq));
    }
    assert_eq!(said, [(0, "a".into(), 0), (0, "b".into(), 2), (1, "b".into(), 2)]);
}

fn matched(external_tokens: u32) -> ScheduleAnswer {
    let answer = Answer::MatchTokens(MatchTokensResponse { header: None, external_tokens });
    ScheduleAnswer { answer: Some(answer), ..Default::default() }
}

#[tokio::test]
async fn a_call_that_is_refused_is_an_error_in_its_place_and_the_others_are_answered() {
    let (server, _steps) = scheduled(|_, _| {
        let failure = Failure {
            reason: FailureReason::BlockDuplicate.into(),
            next: NextStep::FixRequest.into(),
            message: "twice".into(),
            ..Default::default()
        };
        let refused = ScheduleAnswer { failure: Some(failure), status_code: 3, answer: None };
        Ok(ScheduleResponse { header: header(7, 0), answers: vec![refused, matched(32)], ..Default::default() })
    })
    .await;
    let calls = [AbortRequestRequest::default().into(), MatchTokensRequest::default().into()];
    let step = soon(client(server.address).scheduler().step(calls)).await.unwrap();
    let refused = step.answers[0].as_ref().unwrap_err();
    assert_eq!((refused.code(), refused.reason()), (Code::InvalidArgument, FailureReason::BlockDuplicate));
    assert_eq!((refused.next(), refused.message()), (NextStep::FixRequest, "twice"));
    assert!(matches!(step.answers[1], Ok(Answer::MatchTokens(MatchTokensResponse { external_tokens: 32, .. }))));
}

#[tokio::test]
async fn a_step_may_say_that_blocks_are_needed() {
    let (server, mut steps) = scheduled(|_, _| {
        Ok(ScheduleResponse { header: header(7, 0), answers: vec![matched(0)], ..Default::default() })
    })
    .await;
    let needed = BlocksNeededRequest { request_time_us: 5, ..Default::default() };
    soon(client(server.address).scheduler().step([needed.clone().into()])).await.unwrap();
    let (_, step) = soon(steps.recv()).await.unwrap();
    assert_eq!(step.calls[0].call, Some(Call::BlocksNeeded(needed)));
}

#[tokio::test]
async fn a_step_of_another_life_is_refused_until_the_scheduler_starts_over() {
    let (server, _steps) = scheduled(|step, request| {
        let life = if step == 0 { 7 } else { 8 };
        if request.incarnation != 0 && request.incarnation != life {
            return Err(Status::aborted("another life"));
        }
        Ok(ScheduleResponse { header: header(life, 0), news: news([1]), ..Default::default() })
    })
    .await;
    let mut scheduler = client(server.address).scheduler();
    soon(scheduler.step([])).await.unwrap();
    assert_eq!(soon(scheduler.step([])).await.unwrap_err().code(), Code::Aborted);
    scheduler.start_over();
    let step = soon(scheduler.step([])).await.unwrap();
    assert_eq!((scheduler.incarnation(), told(&step.news)), (8, vec![1]));
}

#[tokio::test]
async fn a_poll_goes_on_behind_the_news_of_steps_and_polls() {
    let poll_scheduler_news = on(|request: Request<PollSchedulerNewsRequest>| {
        let after = request.into_inner().after_seq;
        async move { Ok(PollSchedulerNewsResponse { header: header(7, 0), news: news([after + 1]), more: false }) }
    });
    let scheduling = Scheduling { poll_scheduler_news, ..Default::default() };
    let server = Server { scheduling, ..Default::default() }.start().await;
    let mut scheduler = client(server.address).scheduler();
    for expected in 1..4 {
        assert_eq!(told(&soon(scheduler.poll(Duration::ZERO)).await.unwrap()), [expected]);
    }
}

#[tokio::test]
async fn the_answer_to_a_step_that_was_given_up_is_not_taken_for_that_to_the_next_one() {
    let streams = AtomicUsize::new(0);
    let schedule = on(move |request: Request<Streaming<ScheduleRequest>>| {
        let first = streams.fetch_add(1, Ordering::SeqCst) == 0;
        let (outgoing, incoming) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut requests = request.into_inner();
            while let Ok(Some(_)) = requests.message().await {
                if !first {
                    let reply = ScheduleResponse { header: header(7, 0), news: news([1]), ..Default::default() };
                    let _ = outgoing.send(Ok(reply)).await;
                }
            }
        });
        let stream: Answers<ScheduleResponse> = ReceiverStream::new(incoming);
        async move { Ok(stream) }
    });
    let scheduling = Scheduling { schedule, ..Default::default() };
    let server = Server { scheduling, ..Default::default() }.start().await;
    let mut scheduler = client(server.address).scheduler();
    assert!(tokio::time::timeout(Duration::from_millis(50), scheduler.step([])).await.is_err());
    assert_eq!(told(&soon(scheduler.step([])).await.unwrap().news), [1]);
}
