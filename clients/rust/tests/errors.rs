//! Tests what the typed error of a call contains.

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{Pool, Server, client, on, soon};
use kvgrpc::v1::{FailureReason, FreeBlocksRequest, NextStep};
use kvgrpc::{DOMAIN, Error, FieldViolation};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

async fn refused_with(status: Status) -> Error {
    let free_blocks = on(move |_| {
        let status = status.clone();
        async move { Err(status) }
    });
    let pool = Pool { free_blocks, ..Default::default() };
    let server = Server { pool, ..Default::default() }.start().await;
    soon(client(server.address).pool().free_blocks(FreeBlocksRequest::default())).await.unwrap_err().into()
}

fn details(reason: &str, domain: &str) -> ErrorDetails {
    let metadata = [("next", "RETRY_HERE"), ("engine_id", "P"), ("incarnation", "9007199254740991"), ("group", "1")];
    let metadata: HashMap<String, String> = metadata.map(|(key, value)| (key.into(), value.into())).into();
    let mut details = ErrorDetails::with_error_info(reason, domain, metadata);
    details.set_retry_info(Some(Duration::from_millis(500))).add_bad_request_violation("blocks.groups[0]", "unknown");
    details
}

#[tokio::test]
async fn the_details_of_a_status_become_fields() {
    let details = details("POOL_EXHAUSTED", DOMAIN);
    let error = refused_with(Status::with_error_details(Code::ResourceExhausted, "no blocks", details)).await;
    assert_eq!((error.code(), error.code_name()), (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"));
    assert_eq!((error.reason(), error.reason_name()), (FailureReason::PoolExhausted, "POOL_EXHAUSTED"));
    assert_eq!((error.next(), error.may_retry()), (NextStep::RetryHere, true));
    assert_eq!((error.engine_id(), error.incarnation()), ("P", 9_007_199_254_740_991));
    assert_eq!(error.metadata()["group"], "1");
    assert_eq!(error.retry_delay(), Some(Duration::from_millis(500)));
    let violation = FieldViolation { field: "blocks.groups[0]".into(), description: "unknown".into() };
    assert_eq!(error.violations(), [violation]);
    let text = "RESOURCE_EXHAUSTED POOL_EXHAUSTED: no blocks; blocks.groups[0]: unknown";
    assert_eq!(error.to_string(), format!("{text} (PoolService/FreeBlocks at {})", error.address()));
}

#[tokio::test]
async fn a_status_without_details_is_a_typed_error_too() {
    let error = refused_with(Status::permission_denied("no")).await;
    assert_eq!((error.code(), error.message()), (Code::PermissionDenied, "no"));
    assert_eq!((error.reason(), error.reason_name()), (FailureReason::Unspecified, ""));
    assert!(!error.may_retry() && error.violations().is_empty() && error.retry_delay().is_none());
    assert!(error.to_string().starts_with("PERMISSION_DENIED: no ("));
}

#[tokio::test]
async fn a_reason_that_is_unknown_keeps_its_name_and_has_no_retry() {
    let details = details("MOON_FULL", DOMAIN);
    let error = refused_with(Status::with_error_details(Code::Internal, "later", details)).await;
    assert_eq!((error.reason(), error.reason_name()), (FailureReason::Unspecified, "MOON_FULL"));
    assert_eq!((error.next(), error.may_retry()), (NextStep::Unspecified, false));
    assert_eq!(error.metadata()["next"], "RETRY_HERE");
}

#[tokio::test]
async fn the_reasons_of_others_are_not_ours() {
    let details = details("POOL_EXHAUSTED", "example.com");
    let error = refused_with(Status::with_error_details(Code::ResourceExhausted, "full", details)).await;
    assert_eq!((error.reason(), error.reason_name(), error.engine_id()), (FailureReason::Unspecified, "", ""));
}

#[tokio::test]
async fn an_error_tells_what_was_called_and_where_and_the_key_that_repeats_the_call() {
    let free_blocks = on(|_| async { Err(Status::not_found("no")) });
    let server = Server { pool: Pool { free_blocks, ..Default::default() }, ..Default::default() }.start().await;
    let request = FreeBlocksRequest { idempotency_key: "mine".into(), ..Default::default() };
    let error: Error = soon(client(server.address).pool().free_blocks(request)).await.unwrap_err().into();
    assert_eq!((error.method(), error.address()), ("PoolService/FreeBlocks", server.address.to_string().as_str()));
    assert_eq!(error.idempotency_key(), "mine");
    let made = soon(client(server.address).pool().free_blocks(FreeBlocksRequest::default())).await.unwrap_err();
    assert_eq!(Error::from(made).idempotency_key().len(), 32);
    let away: Error = soon(client("127.0.0.1:1".parse().unwrap()).pool().free_blocks(FreeBlocksRequest::default()))
        .await
        .unwrap_err()
        .into();
    assert_eq!((away.code(), away.method()), (Code::Unavailable, "PoolService/FreeBlocks"));
}
