//! What is printed of a message.

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
