//! Tests what is printed of a message, and of a client.

use kvgrpc::v1::cancel_transfer_request::Target;
use kvgrpc::v1::{
    CancelTransferRequest, FinishedBlocksResponse, Grant, HandshakeRequest, PullBlocksRequest, TensorName,
};

const SECRET: &[u8] = b"open sesame";

#[test]
fn no_secret_is_printed_at_any_depth() {
    let grant = Grant { token: SECRET.into(), engine_id: "P".into(), ..Default::default() };
    let texts = [
        format!("{:?}", grant.clone()),
        format!("{:#?}", FinishedBlocksResponse { grant: Some(grant), ..Default::default() }),
        format!("{:?}", PullBlocksRequest { transfer_key: SECRET.into(), ..Default::default() }),
        format!("{:?}", TensorName { transfer_key: SECRET.into(), ..Default::default() }),
        format!("{:?}", HandshakeRequest { proofs: vec![SECRET.into()], ..Default::default() }),
        format!(
            "{:?}",
            CancelTransferRequest { target: Some(Target::TransferKey(SECRET.into())), ..Default::default() }
        ),
    ];
    let bytes = format!("{SECRET:?}");
    for text in &texts {
        assert!(text.contains("[REDACTED]"), "{text}");
        assert!(!text.contains("open sesame") && !text.contains(&bytes[1..12]), "{text}");
    }
    assert!(texts[0].contains("engine_id: \"P\""), "{}", texts[0]);
}

#[tokio::test]
async fn the_metadata_of_a_client_is_not_printed() {
    let metadata = vec![("authorization".to_owned(), "Bearer open-sesame".to_owned())];
    let options = kvgrpc::Options { metadata, ..Default::default() };
    let client = kvgrpc::connect("127.0.0.1:1", options.clone()).unwrap();
    let target = Target::TransferId("t-1".into());
    let side = kvgrpc::Side { client: client.clone(), target, free_allocation_ids: Vec::new() };
    for text in
        [format!("{options:?}"), format!("{client:?}"), format!("{:?}", client.scheduler()), format!("{side:?}")]
    {
        assert!(text.contains("authorization") && !text.contains("open-sesame"), "{text}");
    }
}
