//! Facts about a method that the channel needs before it sends a call.

use std::time::Duration;

use prost::Message;

use crate::v1::{
    GetTensorRequest, PollSchedulerNewsRequest, PullBlocksRequest, PutTensorRequest, ReserveBlocksRequest,
    WaitTransferRequest, WaitTransfersRequest,
};
use crate::values::std_duration;

const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Time that PutTensor adds to the deadline. PutTensor returns when its consumers have the tensor. Without a timeout in
/// the request the server waits two minutes. A stated timeout is limited to the longest life of a lease.
const PUT_TENSOR: Duration = Duration::from_secs(120);
const LONGEST_PUT_TENSOR: Duration = Duration::from_secs(600);

/// Time that ConnectPeer adds to the deadline, because it waits for another server. The usual total is one minute.
const CONNECT_PEER: Duration = Duration::from_secs(50);
/// Time that ReleaseQuarantine adds to the deadline. The call is over when every rank has begun its data paths again.
/// The usual total is one minute.
const RELEASE_QUARANTINE: Duration = Duration::from_secs(50);
const CONNECT_PEER_PATH: &str = "/kvgrpc.v1.HandshakeService/ConnectPeer";

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Method {
    pub unary: bool,
    /// Number of the request's field `idempotency_key`.
    pub key_field: Option<i32>,
}

impl Method {
    /// Returns None for a method of another package.
    pub fn of(path: &str) -> Option<Self> {
        Some(include!(concat!(env!("OUT_DIR"), "/methods.rs")))
    }
}

/// Returns whether the method is retried after UNAVAILABLE. ConnectPeer is not: its UNAVAILABLE comes from the other
/// server, after the full time that a connection may take.
pub(crate) fn is_repeated(path: &str) -> bool {
    path != CONNECT_PEER_PATH
}

/// Returns how long the server may take by the request's own fields, in addition to the deadline of any call.
pub(crate) fn time_at_server(path: &str, request: &[u8]) -> Duration {
    let wait = |timeout: Option<prost_types::Duration>| timeout.map_or(LONGEST_WAIT, std_duration).min(LONGEST_WAIT);
    match path {
        "/kvgrpc.v1.TransferService/WaitTransfer" => {
            WaitTransferRequest::decode(request).map_or(LONGEST_WAIT, |asked| wait(asked.timeout))
        }
        "/kvgrpc.v1.TransferService/WaitTransfers" => {
            WaitTransfersRequest::decode(request).map_or(LONGEST_WAIT, |asked| wait(asked.timeout))
        }
        "/kvgrpc.v1.HandoffService/PullBlocks" => {
            let asked = PullBlocksRequest::decode(request).unwrap_or_default();
            asked.wait.map_or(Duration::ZERO, |in_call| wait(in_call.timeout))
        }
        "/kvgrpc.v1.HandoffService/ReserveBlocks" => {
            let asked = ReserveBlocksRequest::decode(request).unwrap_or_default();
            asked.wait.map_or(Duration::ZERO, |in_call| wait(in_call.timeout))
        }
        "/kvgrpc.v1.SchedulerService/PollSchedulerNews" => {
            let asked = PollSchedulerNewsRequest::decode(request).unwrap_or_default();
            asked.wait.map_or(Duration::ZERO, std_duration).min(LONGEST_WAIT)
        }
        "/kvgrpc.v1.TensorService/GetTensor" => {
            GetTensorRequest::decode(request).map_or(LONGEST_WAIT, |asked| wait(asked.timeout))
        }
        "/kvgrpc.v1.TensorService/PutTensor" => {
            let asked = PutTensorRequest::decode(request).unwrap_or_default();
            asked.timeout.map_or(PUT_TENSOR, std_duration).min(LONGEST_PUT_TENSOR)
        }
        CONNECT_PEER_PATH => CONNECT_PEER,
        "/kvgrpc.v1.AdminService/ReleaseQuarantine" => RELEASE_QUARANTINE,
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::proto_duration;

    #[test]
    fn the_table_is_made_from_the_schema() {
        let pull = Method::of("/kvgrpc.v1.HandoffService/PullBlocks");
        assert_eq!(pull, Some(Method { unary: true, key_field: Some(1) }));
        let keep_alive = Method::of("/kvgrpc.v1.LeaseService/KeepAlive");
        assert_eq!(keep_alive, Some(Method { unary: false, key_field: None }));
        assert_eq!(Method::of("/grpc.health.v1.Health/Check"), None);
    }

    #[test]
    fn a_wait_that_is_unset_or_too_long_is_a_minute() {
        let path = "/kvgrpc.v1.TransferService/WaitTransfer";
        let asked = |timeout| WaitTransferRequest { timeout, ..Default::default() }.encode_to_vec();
        let hour = Some(proto_duration(Duration::from_secs(3600)));
        assert_eq!(time_at_server(path, &asked(None)), LONGEST_WAIT);
        assert_eq!(time_at_server(path, &asked(hour)), LONGEST_WAIT);
        let second = Some(proto_duration(Duration::from_secs(1)));
        assert_eq!(time_at_server(path, &asked(second)), Duration::from_secs(1));
    }

    #[test]
    fn a_tensor_that_is_put_or_wanted_has_its_time_at_the_server() {
        let put = |timeout| PutTensorRequest { timeout, ..Default::default() }.encode_to_vec();
        let get = |timeout| GetTensorRequest { timeout, ..Default::default() }.encode_to_vec();
        let time = |seconds| Some(proto_duration(Duration::from_secs(seconds)));
        let (at_put, at_get) = ("/kvgrpc.v1.TensorService/PutTensor", "/kvgrpc.v1.TensorService/GetTensor");
        assert_eq!(time_at_server(at_put, &put(None)), PUT_TENSOR);
        assert_eq!(time_at_server(at_put, &put(time(5))), Duration::from_secs(5));
        assert_eq!(time_at_server(at_put, &put(time(3600))), LONGEST_PUT_TENSOR);
        assert_eq!(time_at_server(at_get, &get(None)), LONGEST_WAIT);
        assert_eq!(time_at_server(at_get, &get(time(5))), Duration::from_secs(5));
    }

    #[test]
    fn a_call_that_waits_for_ranks_or_for_another_server_has_a_minute_with_the_usual_deadline() {
        for path in ["/kvgrpc.v1.AdminService/ReleaseQuarantine", CONNECT_PEER_PATH] {
            assert!(Method::of(path).is_some());
            assert_eq!(time_at_server(path, &[]), Duration::from_secs(50));
        }
    }

    #[test]
    fn a_poll_without_a_wait_does_not_wait() {
        assert_eq!(time_at_server("/kvgrpc.v1.SchedulerService/PollSchedulerNews", &[]), Duration::ZERO);
    }
}
