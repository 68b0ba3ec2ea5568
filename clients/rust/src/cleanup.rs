//! Cleans up after a request at all engines that took part in it.

use tonic::Code;

use crate::Error;
use crate::client::Client;
use crate::v1::cancel_transfer_request::Target;
use crate::v1::{CancelTransferRequest, CancelTransferResponse};

/// One engine that took part in a request.
#[derive(Clone, Debug)]
pub struct Side {
    /// The client of its server.
    pub client: Client,
    /// The transfers of the request at this engine: all by key, or one by id.
    pub target: Target,
    /// The allocations to free as well.
    pub free_allocation_ids: Vec<String>,
}

/// Cancels the request at all sides in parallel and frees what it held there. Every side is told, whatever the others
/// answer. The results are in the order of the sides. `message` goes to logs and to the failure of the transfers.
///
/// Once started, the clean-up continues in the background even if its future is dropped, as a request that ends often
/// drops it.
pub async fn clean_up(sides: Vec<Side>, message: &str) -> Vec<Result<CancelTransferResponse, Error>> {
    let calls: Vec<_> = sides
        .into_iter()
        .map(|side| {
            let request = CancelTransferRequest {
                target: Some(side.target),
                message: message.to_owned(),
                free_allocation_ids: side.free_allocation_ids,
                ..Default::default()
            };
            tokio::spawn(async move { side.client.transfers().cancel_transfer(request).await })
        })
        .collect();
    let mut answers = Vec::with_capacity(calls.len());
    for call in calls {
        answers.push(match call.await {
            Ok(answer) => answer.map(tonic::Response::into_inner).map_err(Error::from),
            Err(defect) => Err(Error::new(Code::Internal, defect.to_string())),
        });
    }
    answers
}
